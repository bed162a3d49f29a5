"""What goes to Muon and what to the backup: by module, name and whole shape, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FlatParameter, fully_shard
from torch.distributed.tensor import DTensor

from adapters._routing import (
    Route,
    check_covers,
    decays,
    listing,
    route_lists,
    route_model,
    route_named,
)
from consensus.testing._threads import run_threads
from tests.unit.test_codebook import golden

ROUTING = golden("hybrid")["routing"]
FLAT = FlatParameter(torch.zeros(4))  # type: ignore[no-untyped-call]
SAME = nn.Parameter(torch.zeros(2, 2))


class Tree(nn.Module):
    """A module with these children and parameters, in this order."""

    def __init__(self, **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def tied(source: nn.Embedding | nn.Linear) -> nn.Linear:
    """A head that has the weight of ``source``."""
    head = nn.Linear(source.weight.shape[1], source.weight.shape[0], bias=False)
    head.weight = source.weight
    return head


def in_half(routes: Iterable[Route], use_muon: bool) -> list[str]:
    return [route.name for route in routes if route.use_muon is use_muon]


def reasons(routes: Iterable[Route]) -> dict[str, str]:
    return {route.name: route.reason for route in routes}


def matrices(*names: str) -> list[tuple[str, Tensor]]:
    return [(name, param(2, 2)) for name in names]


def test_a_small_model_is_routed_as_by_the_reference() -> None:
    shared = nn.Embedding(7, 4)
    q_proj = nn.Linear(4, 4)
    q_proj.bias.requires_grad_(False)
    model = Tree(
        embed_tokens=nn.Embedding(7, 4),
        shared=shared,
        q_proj=q_proj,
        output_dense=nn.Linear(4, 4, bias=False),
        norm=nn.LayerNorm(4),
        conv=nn.Conv1d(4, 4, 3),
        score=nn.Linear(4, 2),
        lm_head=nn.Linear(4, 7, bias=False),
        tied=tied(shared),
    )
    routes = route_model(model)
    assert in_half(routes, True) == ROUTING["muon"]
    assert in_half(routes, False) == ROUTING["backup"]
    params = dict(model.named_parameters())
    assert all(route.param is params[route.name] for route in routes)
    assert reasons(routes)["shared.weight"] == "embedding (also tied.weight)"
    assert reasons(routes)["score.weight"] == "name contains 'score'"


def test_a_head_before_its_embedding_follows_it() -> None:
    words = nn.Embedding(7, 4)
    routes = route_model(Tree(output=tied(words), body=nn.Linear(4, 4), decoder=Tree(words=words)))
    assert reasons(routes)["output.weight"] == "tied to embedding decoder.words.weight"
    assert in_half(routes, True) == ["body.weight"]
    assert in_half(routes, False) == ["output.weight", "body.bias"]
    # A model may be without matrices for Muon.
    assert in_half(route_model(words), False) == ["weight"]


def test_any_of_a_parameters_names_counts() -> None:
    body = nn.Linear(4, 4, bias=False)
    (route,) = route_model(Tree(body=body, lm_head=tied(body)))
    assert (route.name, route.use_muon) == ("body.weight", False)
    assert route.reason == "its other name lm_head.weight contains 'lm_head'"
    assert reasons(route_model(nn.Sequential(body, body))) == {"0.weight": "hidden matrix"}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_nested_embeddings_are_found_by_their_type(kind: Callable[..., nn.Module]) -> None:
    inner = Tree(tokens=kind(7, 4), other=nn.utils.parametrizations.orthogonal(kind(7, 4)))
    routes = route_model(Tree(body=nn.Linear(4, 4, bias=False), a=Tree(b=inner)))
    assert reasons(routes) == {
        "body.weight": "hidden matrix",
        "a.b.tokens.weight": "embedding",
        "a.b.other.parametrizations.weight.original": "embedding",
    }


def test_only_a_models_frozen_parameters_have_no_route() -> None:
    model = Tree(body=nn.Linear(4, 4).requires_grad_(False), adapter=nn.Linear(4, 2, bias=False))
    assert [route.name for route in route_model(model)] == ["adapter.weight"]
    with pytest.raises(ValueError, match="Tree has no parameter that requires a gradient"):
        route_model(model.requires_grad_(False))
    # A list was chosen by the caller, and is taken whole.
    assert len(route_named(model.named_parameters())) == 3


def shards_and_routes(rank: int) -> tuple[tuple[int, ...], dict[str, str]]:
    del rank
    # 3 rows on 4 ranks: the last rank holds none, and the others hold single rows.
    model = Tree(words=nn.Embedding(3, 4), body=nn.Linear(4, 3), gate=nn.Linear(4, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    check_covers(routes := route_model(model), model)
    body = routes[1].param
    assert isinstance(body, DTensor)
    return tuple(body.to_local().shape), reasons(routes)


def test_whole_shapes_decide_where_parameters_are_sharded() -> None:
    found = run_threads(shards_and_routes, 4).values()
    assert [local for local, _ in found] == [(1, 4), (1, 4), (1, 4), (0, 4)]
    expected = {
        "words.weight": "embedding",
        "body.weight": "hidden matrix",
        "body.bias": "1-D",
        "gate.weight": "a single row",
        "gate.bias": "1-D",
    }
    assert [routes for _, routes in found] == [expected] * 4


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (nn.GELU(), "at least one parameter to optimise, but GELU has no parameter that requires"),
        (Tree(a=param(0)), r"1 of 1 have no elements: a\. FSDP1 and ZeRO-3"),
        (Tree(w=param(0), norm=param(4)), r"1 of 2 have no elements: w\."),
        (Tree(w=param(0, 4), v=param(0)), r"2 of 2 have no elements: w, v\."),
        (nn.LazyLinear(4), "weight belongs to a lazy module"),
        (Tree(flat=FLAT, w=SAME), "flat is one of FSDP1's flat parameters"),
    ],
    ids=str,
)
def test_a_model_without_what_can_be_routed_is_refused(model: nn.Module, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        route_model(model)


def test_only_a_module_is_a_model() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got list"):
        route_model([("a", SAME)])  # type: ignore[arg-type]


def test_names_and_shapes_are_judged_as_by_the_reference() -> None:
    shapes = {"a.bias": (4,), "conv.weight": (4, 4, 3)}
    expected: dict[str, bool] = ROUTING["by_name_only"]
    routes = route_named((name, param(*shapes.get(name, (4, 4)))) for name in expected)
    assert {route.name: route.use_muon for route in routes} == expected


@pytest.mark.parametrize(
    ("reason", "shapes"),
    [
        ("0-D", [()]),
        ("1-D", [(4,), (1,)]),
        ("4-D", [(2, 2, 3, 3)]),
        ("no elements", [(0,), (0, 4), (4, 0)]),
        ("a single row", [(1, 4), (1, 1)]),
        ("a single column", [(4, 1)]),
        ("hidden matrix", [(2, 2), (2, 3)]),
    ],
)
def test_a_whole_shape_decides(reason: str, shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        route, _ = route_named([("a", param(*shape)), ("w", SAME)])
        assert (route.reason, route.use_muon) == (reason, reason == "hidden matrix")
    (route,) = route_named([("a", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))])
    assert (route.reason, route.use_muon) == ("complex", False)


def test_a_shape_is_a_stronger_reason_than_a_name() -> None:
    routes = route_named([("embed.norm", param(4)), ("embed.proj", param(4, 4))])
    assert [route.reason for route in routes] == ["1-D", "name contains 'embed'"]


def test_names_are_compared_without_regard_to_case() -> None:
    backup = ["Tok_EMBED.w", "h.wte", "h.WPE", "LM_Head.weight", "classifier.out", "Score.w"]
    wrapped = "module._orig_mod._fsdp_wrapped_module._checkpoint_wrapped_module.w"
    routes = route_named(matrices(*backup, wrapped))
    assert (in_half(routes, True), in_half(routes, False)) == ([wrapped], backup)


def test_own_substrings_replace_the_defaults() -> None:
    pairs = matrices("moe.ROUTER.w", "lm_head.w", "router2.w")
    assert in_half(route_named(pairs, backup_substrings=iter(["Router"])), True) == ["lm_head.w"]
    assert in_half(route_named(pairs, backup_substrings=()), False) == []
    assert in_half(route_model(nn.Linear(2, 2), backup_substrings=["weig"]), True) == []


@pytest.mark.parametrize(
    ("substrings", "error"),
    [("lm_head", TypeError), ("", TypeError), ([1], TypeError), (["norm", ""], ValueError)],
)
def test_unclear_substrings_are_refused(substrings: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="backup_substrings"):
        route_model(nn.Linear(2, 2), backup_substrings=substrings)
    with pytest.raises(error, match="backup_substrings"):
        route_named([("w", param(2, 2))], backup_substrings=substrings)
    with pytest.raises(error, match="no_decay_substrings"):
        decays("w", substrings)


def test_lists_are_followed_also_against_the_rules() -> None:
    head, row, body = param(7, 4), param(1, 4), param(4, 4)
    routes = route_lists(iter([("lm_head.w", head), ("gate", row)]), [("body", body)])
    assert [each.use_muon for each in routes] == [True, True, False]
    assert [id(each.param) for each in routes] == [id(head), id(row), id(body)]
    assert [each.reason for each in routes[1:]] == ["in Muon's list", "in the backup's list"]
    assert in_half(route_lists([("a", param(2, 2))], []), True) == ["a"]
    assert in_half(route_lists([], [("a", param(2)), ("b", param(0))]), False) == ["a", "b"]


@pytest.mark.parametrize(
    "wrong",
    [None, SAME, nn.Linear(2, 2), [SAME], [("a", SAME, 0.1)], [(3, SAME)], [None], {"a": SAME}],
    ids=lambda value: type(value).__name__,
)
def test_only_pairs_of_a_name_and_a_tensor_are_taken(wrong: Any) -> None:
    good = matrices("good")
    with pytest.raises(TypeError, match=r"the list: expected \(name, parameter\) pairs.* got"):
        route_named(wrong)
    with pytest.raises(TypeError, match="Muon's list: expected"):
        route_lists(wrong, good)
    with pytest.raises(TypeError, match="the backup's list: expected"):
        route_lists(good, wrong)
    with pytest.raises(TypeError, match=r"got \(str, int\) at position 1"):
        route_named([("a", SAME), ("b", 3)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("muon", "backup", "error"),
    [
        ([("a", SAME), ("b", SAME)], [], "b in Muon's list is the same tensor as a in Muon's list"),
        ([("a", SAME)], [("b", SAME)], "b in the backup's list is the same tensor as a in Muon's"),
        ([], [("a", SAME), ("a", SAME)], "a in the backup's list is the same tensor as a in the"),
        ([("w", SAME)], [("W", param(2))], "W in the backup's list and w in Muon's list are two"),
    ],
)
def test_a_parameter_or_name_comes_once(muon: Any, backup: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        route_lists(muon, backup)
    with pytest.raises(ValueError, match="in the list"):
        route_named([*muon, *backup])


@pytest.mark.parametrize("shape", [(4,), (), (2, 2, 2), (0, 4), (0,)], ids=str)
def test_muons_list_takes_matrices_only(shape: tuple[int, ...]) -> None:
    pairs = [("fine", param(2, 2)), ("layers.0.bad", param(*shape))]
    with pytest.raises(ValueError, match=r"2-D parameters with elements; got layers\.0\.bad with"):
        route_lists(pairs, [])


def test_lists_with_nothing_to_optimise_are_refused() -> None:
    with pytest.raises(ValueError, match="both lists are empty"):
        route_lists([], [])
    with pytest.raises(ValueError, match="2 of 2 have no elements: a, b"):
        route_lists([], [("a", param(0)), ("b", param(0))])
    with pytest.raises(ValueError, match=r"there is no \(name, parameter\) pair"):
        route_named([])
    with pytest.raises(ValueError, match="weight belongs to a lazy module"):
        route_lists(matrices("w"), nn.LazyLinear(4).named_parameters())


def test_lists_that_cover_a_model_pass() -> None:
    words, body = nn.Embedding(7, 4), nn.Linear(4, 4)
    model = Tree(
        words=words, head=tied(words), body=body, off=nn.Linear(4, 4).requires_grad_(False)
    )
    own = [("temperature", param(1)), ("bias", body.bias), ("head", words.weight)]
    check_covers(route_lists([("body", body.weight)], own), model)
    check_covers(route_named(model.named_parameters()), model)
    check_covers(route_model(model), model)


def test_missing_parameters_are_named() -> None:
    model = Tree(a=nn.Linear(4, 4), off=nn.Linear(4, 4).requires_grad_(False), b=nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"given to neither half: a\.bias, b\.bias\. Add") as error:
        check_covers([each for each in route_model(model) if each.use_muon], model)
    assert not any(text in str(error.value) for text in ("off", "Not in the model"))
    with pytest.raises(ValueError, match="neither half: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"):
        check_covers([], nn.ParameterList([param(2) for _ in range(20)]))


def test_doubled_and_stale_parameters_are_named() -> None:
    routes = route_model(model := nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"Linear once; given more than once: weight\. Leave"):
        check_covers([*routes, routes[0]], model)
    model.weight = param(4, 4)
    with pytest.raises(ValueError, match=r"neither half: weight\..* but given: weight\. If the"):
        check_covers(routes, model)


def test_decay_goes_by_name_without_regard_to_case() -> None:
    assert not decays("layers.0.Norm.weight", ("bias", "norm"))
    assert not decays("layers.0.norm.weight", ["NORM"])
    assert decays("layers.0.attn.weight", iter(["bias", "norm"]))
    assert decays("layers.0.norm.weight", ())


def test_repeated_layers_share_a_line() -> None:
    words = nn.Embedding(7, 4)
    blocks = (
        Tree(norm=nn.LayerNorm(4), mlp=nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
        for _ in range(12)
    )
    gate = nn.Linear(4, 1, bias=False)
    model = Tree(wte=words, layers=nn.ModuleList(blocks), gate=gate, lm_head=tied(words))
    assert listing(route_model(model)).splitlines() == [
        "Muon: 24 parameters, 768 elements",
        "  layers.{0..11}.mlp.0.weight (12x)  8 x 4  hidden matrix",
        "  layers.{0..11}.mlp.2.weight (12x)  4 x 8  hidden matrix",
        "backup: 50 parameters, 272 elements",
        "  wte.weight                         7 x 4  embedding (also lm_head.weight)",
        "  layers.{0..11}.norm.weight (12x)   4      1-D",
        "  layers.{0..11}.norm.bias (12x)     4      1-D",
        "  layers.{0..11}.mlp.0.bias (12x)    8      1-D",
        "  layers.{0..11}.mlp.2.bias (12x)    4      1-D",
        "  gate.weight                        1 x 4  a single row",
    ]


def names_in(routes: Iterable[Route]) -> list[str]:
    return [line.split("  ")[1] for line in listing(routes).splitlines() if line[0] == " "]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("l.10.w", "l.2.w", "l.1.w"), ["l.{1..2,10}.w (3x)"]),
        (("l.0.w", "l.2.w", "l.4.w", "l.5.w"), ["l.{0,2,4..5}.w (4x)"]),
        (tuple(f"l.{i}.w" for i in range(0, 40, 2)), ["l.*.w (20x)"]),
        (("l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"), ["l.{0..1}.e.{0..1} (4x)"]),
        (("l.0.e.0", "l.0.e.1", "l.1.e.0"), ["l.*.e.* (3x)"]),
        (("l.7.e.0", "l.7.e.1"), ["l.7.e.{0..1} (2x)"]),
        (("fc1.w", "fc2.w", "l.1a", "l.2a"), ["fc1.w", "fc2.w", "l.1a", "l.2a"]),
        (("l.01.w", "l.1.w"), ["l.01.w", "l.1.w"]),
    ],
)
def test_numbers_in_names_become_ranges(names: tuple[str, ...], expected: list[str]) -> None:
    assert names_in(route_named(matrices(*names))) == expected
    # Only parameters of one shape and reason share a line.
    routes = route_named([("l.0.w", param(2, 2)), ("l.1.w", param(2, 3)), ("l.2.w", param(2))])
    assert names_in(routes) == ["l.0.w", "l.1.w", "l.2.w"]


def test_a_heading_may_be_chosen() -> None:
    routes = route_lists([("row", param(1, 1234))], [("scale", param())])
    assert listing(routes, ("M", "AdamW")).splitlines() == [
        "M: 1 parameter, 1,234 elements",
        "  row    1 x 1234  in Muon's list",
        "AdamW: 1 parameter, 1 element",
        "  scale  scalar    in the backup's list",
    ]


@pytest.mark.parametrize(
    ("counts", "shown"),
    [((100, 100), (19, 19)), ((100, 3), (35, 3)), ((3, 100), (3, 35)), ((38, 0), (38, 0))],
)
def test_a_long_listing_is_cut(counts: tuple[int, ...], shown: tuple[int, ...]) -> None:
    muon, backup = (
        matrices(*(letter * (i + 1) for i in range(count)))
        for letter, count in zip("ab", counts, strict=True)
    )
    lines = listing(route_lists(muon, backup)).splitlines()
    middle = next(i for i, line in enumerate(lines) if line.startswith("backup"))
    assert (middle - 1, len(lines) - middle - 1) == shown
    assert lines[middle] == f"backup: {counts[1]} parameters, {4 * counts[1]} elements"
    if (hidden := counts[0] - shown[0] + 1) > 1:
        text = f"and {hidden} parameters, {4 * hidden} elements more"
        assert lines[middle - 1].split(maxsplit=1) == ["...", text]
