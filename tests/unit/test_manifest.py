import math
import warnings
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from consensus._manifest import Manifest, option_text, read_manifest

ROWS = (Shard(0),)


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    """Rank 0 of a job of 4, on torch's process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def one_axis() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sharded(
    mesh: DeviceMesh,
    local: tuple[int, ...] = (2, 3),
    placements: Sequence[Placement] = ROWS,
    dtype: torch.dtype = torch.float32,
) -> DTensor:
    return DTensor.from_local(torch.zeros(local, dtype=dtype), mesh, placements, run_check=False)


def parameter(*args: Any, **kwargs: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(sharded(*args, **kwargs))


def group(*named: tuple[str, Tensor], **options: Any) -> dict[str, Any]:
    names, params = [name for name, _ in named], [param for _, param in named]
    return {"params": params, "param_names": names, "lr": 0.1, **options}


def keys(manifest: Manifest, groups: Sequence[dict[str, Any]]) -> dict[str, bytes]:
    """Return what is hashed, by name of the fact."""
    return {fact.name: fact.key for fact in manifest.facts(groups, manifest.gradients())}


# ---- what is read ----


def test_only_parameters_over_several_ranks_are_facts() -> None:
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "one"))["one"]
    plain = torch.nn.Parameter(torch.zeros(2))
    groups = [group(("a", plain), ("b", parameter(one_axis())), ("c", parameter(alone)))]
    manifest = read_manifest(groups)
    assert [param.name for param in manifest.sharded] == ["b"]
    assert set(manifest.by_scope) == {(0, 1, 2, 3)}
    assert len(manifest.params) == 3


def test_a_sharded_parameter_is_described_by_what_all_ranks_see() -> None:
    mesh = two_axes()
    param = parameter(mesh, (2, 3), (Replicate(), Shard(0)), torch.bfloat16)
    (found,) = read_manifest([group(("w", param))]).sharded
    assert found.text == "(4, 3) bfloat16 [R, S(0)] on mesh (dp=2, tp=2)"
    assert found.shape == (2, 3)
    assert found.scope == (0, 1, 2, 3)


def test_each_mesh_is_a_scope_of_its_own() -> None:
    mesh = two_axes()
    groups = [group(("a", parameter(mesh["dp"])), ("b", parameter(mesh["tp"])))]
    manifest = read_manifest(groups)
    assert {scope: [p.name for p in ps] for scope, ps in manifest.by_scope.items()} == {
        (0, 2): ["a"],
        (0, 1): ["b"],
    }
    assert len(manifest.meshes) == 2


def digest_of(*groups: dict[str, Any]) -> int:
    (digest,) = read_manifest(groups).digests.values()
    return digest


def test_whatever_must_be_equal_changes_the_digest() -> None:
    mesh, other = one_axis(), two_axes()
    a, b = ("a", parameter(mesh)), ("b", parameter(mesh))
    digests = [
        digest_of(group(a, b)),
        digest_of(group(b, a)),
        digest_of(group(a)),
        digest_of(group(a, ("c", b[1]))),
        digest_of(group(a, ("b", parameter(mesh, (3, 3))))),
        digest_of(group(a, ("b", parameter(mesh, dtype=torch.bfloat16)))),
        digest_of(group(a, ("b", parameter(mesh, (8, 3), (Replicate(),))))),
        digest_of(group(a, ("b", parameter(other, (2, 3), (Shard(0), Shard(0)))))),
    ]
    assert len(set(digests)) == len(digests)


def test_the_same_parameters_built_anew_have_the_same_digest() -> None:
    assert digest_of(group(("a", parameter(one_axis())))) == digest_of(
        group(("a", parameter(one_axis())), lr=0.3)
    )


def test_parameters_divided_otherwise_among_the_groups_change_the_digest() -> None:
    """The same names in the same order, and the same learning rates: but b learns at another."""
    a, b, c = ((name, parameter(one_axis())) for name in "abc")
    first = digest_of(group(a, b, lr=0.1), group(c, lr=0.2))
    assert first != digest_of(group(a, lr=0.1), group(b, c, lr=0.2))


def test_groups_of_other_parameters_do_not_count() -> None:
    """A rank may have groups before these that hold nothing its peers share."""
    plain = ("p", torch.nn.Parameter(torch.zeros(2)))
    a, b = (("a", parameter(one_axis())), ("b", parameter(one_axis())))
    assert digest_of(group(a), group(b)) == digest_of(group(plain), group(a), group(b))
    groups = [group(plain, lr=5), group(a, lr=1), group(b, lr=2)]
    facts = read_manifest(groups).facts(groups, b"\x00\x00")
    assert dict(facts[1].items()) == {"lr of group 0": "1.0", "lr of group 1": "2.0"}


# ---- identity ----


def test_a_tensor_listed_twice_is_refused() -> None:
    param = parameter(one_axis())
    with pytest.raises(ValueError, match="listed twice"):
        read_manifest([group(("a", param), ("b", param))])


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named 'a'"):
        read_manifest([group(("a", parameter(one_axis())), ("a", parameter(one_axis())))])


def test_unnamed_parameters_that_look_alike_are_warned_about() -> None:
    params = [parameter(one_axis()), parameter(one_axis())]
    with pytest.warns(UserWarning, match="told apart by their position"):
        read_manifest([{"params": params}])


def test_other_parameters_are_not_warned_about() -> None:
    mesh = one_axis()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_manifest([{"params": [parameter(mesh), parameter(mesh, (3, 3))]}])
        read_manifest([group(("a", parameter(mesh)), ("b", parameter(mesh)))])
        read_manifest([{"params": [torch.zeros(2), torch.zeros(2)]}])


# ---- change ----


def test_a_manifest_is_current_until_a_tensor_or_requires_grad_changes() -> None:
    mesh = one_axis()
    groups = [group(("a", parameter(mesh)), ("b", parameter(mesh)))]
    manifest = read_manifest(groups)
    assert manifest.is_current(groups)
    groups[0]["params"][1].requires_grad_(False)
    assert not manifest.is_current(groups)
    assert manifest.what_changed(groups) == "b now has requires_grad=False"
    groups[0]["params"][1].requires_grad_(True)
    assert manifest.is_current(groups)
    groups[0]["params"][1] = parameter(mesh)
    assert not manifest.is_current(groups)
    assert "b is another tensor" in manifest.what_changed(groups)
    groups[0]["params"].append(parameter(mesh))
    assert not manifest.is_current(groups)
    assert manifest.what_changed(groups) == "expected 2 parameters; got 3"


def test_a_new_learning_rate_is_no_change_of_parameters() -> None:
    groups = [group(("a", parameter(one_axis())))]
    manifest = read_manifest(groups)
    groups[0]["lr"] = 0.5
    assert manifest.is_current(groups)


# ---- gradients ----


def test_presence_is_told_by_name_and_compared_by_scope() -> None:
    mesh = two_axes()
    a, b, c = parameter(mesh["dp"]), parameter(mesh["tp"]), parameter(mesh["dp"])
    groups = [group(("a", a), ("b", b), ("c", c))]
    manifest = read_manifest(groups)
    c.grad = sharded(mesh["dp"])
    facts = manifest.facts(groups, manifest.gradients())
    shown = {fact.scope: fact for fact in facts if fact.name == "gradients"}
    assert {scope: fact.key for scope, fact in shown.items()} == {(0, 2): b"\0\1", (0, 1): b"\0"}
    assert dict(shown[(0, 2)].items()) == {"a": "missing", "c": "present"}


# Older ones let no gradient have another dtype.
needs_grad_dtype = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="needs a torch whose tensors have grad_dtype"
)


@needs_grad_dtype
def test_a_gradient_of_another_dtype_is_another_presence() -> None:
    mesh = one_axis()
    param = parameter(mesh, dtype=torch.bfloat16)
    param.grad_dtype = None
    groups = [group(("a", param))]
    manifest = read_manifest(groups)
    found = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        param.grad = sharded(mesh, dtype=dtype)
        found.append(keys(manifest, groups)["gradients"])
    assert len(set(found)) == 3


def misfit(kind: str, mesh: DeviceMesh) -> Tensor:
    """Return what cannot be the gradient of an (8, 3) parameter cut into rows on ``mesh``."""
    if kind == "plain":
        return torch.zeros(8, 3)
    if kind == "sparse":
        return torch.sparse_coo_tensor(
            torch.zeros((2, 0), dtype=torch.int64), [], (8, 3), check_invariants=True
        )
    if kind == "placements":
        return sharded(mesh, (8, 3), (Replicate(),))
    if kind == "mesh":
        return sharded(two_axes(), (2, 3), (Shard(0), Shard(0)))
    if kind == "local shape":
        shape = torch.Size((8, 3))
        local = torch.zeros(3, 3)
        return DTensor.from_local(local, mesh, ROWS, run_check=False, shape=shape, stride=(3, 1))
    return sharded(mesh, dtype={"complex": torch.complex64, "integer": torch.int32}[kind])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("plain", "expected a DTensor gradient"),
        ("sparse", "expected a dense gradient"),
        pytest.param("complex", "expected a real gradient", marks=needs_grad_dtype),
        pytest.param("integer", "expected a real gradient", marks=needs_grad_dtype),
        ("placements", "expected a gradient placed"),
        ("mesh", "expected a gradient placed"),
        ("local shape", "expected a gradient of shape"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_by_name(kind: str, text: str) -> None:
    mesh = one_axis()
    param = parameter(mesh)
    param.grad_dtype = None
    manifest = read_manifest([group(("first", parameter(mesh, (1, 1))), ("w", param))])
    param.grad = misfit(kind, mesh)
    with pytest.raises(ValueError, match=f"w: {text}"):
        manifest.gradients()


# ---- options ----


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.2), ("momentum", 0.9), ("betas", (0.9, 0.99)), ("new", None)]
)
def test_an_option_that_differs_changes_its_fact_and_no_other(name: str, value: object) -> None:
    groups = [group(("a", parameter(one_axis())), momentum=0.95, betas=(0.9, 0.95))]
    manifest = read_manifest(groups)
    before = keys(manifest, groups)
    groups[0][name] = value
    after = keys(manifest, groups)
    assert [fact for fact in before if before[fact] != after[fact]] == ["options"]
    groups[0] |= {"lr": 0.1, "momentum": 0.95, "betas": (0.9, 0.95)}
    groups[0].pop("new", None)
    assert keys(manifest, groups) == before


def test_options_of_groups_without_parameters_of_the_scope_are_not_compared() -> None:
    plain = torch.nn.Parameter(torch.zeros(2))
    groups = [group(("a", parameter(one_axis()))), group(("p", plain), lr=0.5)]
    manifest = read_manifest(groups)
    before = keys(manifest, groups)
    groups[1]["lr"] = 0.7
    assert keys(manifest, groups) == before


class Mode(Enum):
    EXACT = 1
    APPROX = 2


# Equal in meaning within a row, unequal between rows.
OPTIONS: tuple[tuple[object, ...], ...] = (
    (0, 0.0, -0.0, False, np.float64(0), torch.tensor(0.0)),
    (1, 1.0, True, np.int64(1), np.float32(1), torch.tensor(1.0)),
    (0.1, np.float64(0.1), torch.tensor(0.1, dtype=torch.float64)),
    (float(np.float32(0.1)), np.float32(0.1)),
    (2**53, 2.0**53),
    (2**53 + 1,),
    (2**80,),
    (math.inf,),
    (math.nan, -math.nan, np.float32("nan")),
    (None,),
    ("None",),
    ("1.0",),
    ((0.9, 0.99), [0.9, 0.99]),
    ((0.9, 0.98),),
    ({"a": 1}, {"a": 1.0}),
    ({"a": 2},),
    (torch.bfloat16,),
    (torch.float32,),
    (Mode.EXACT,),
    (Mode.APPROX,),
)


def test_options_compare_by_value() -> None:
    rows = [{option_text(value) for value in row} for row in OPTIONS]
    assert [len(row) for row in rows] == [1] * len(OPTIONS)
    assert len(set.union(*rows)) == len(OPTIONS)


def test_an_object_is_compared_by_its_type_since_its_text_may_hold_an_address() -> None:
    assert option_text(object()) == option_text(object()) == "object"
    assert option_text(len) == option_text(print)


def test_a_tensor_that_is_not_on_the_host_is_never_read() -> None:
    lr = torch.zeros((), device="meta")
    assert option_text(lr) == "tensor written 0 times"
    lr.add_(1)
    assert option_text(lr) == "tensor written 1 times"
