"""Which elements a rank holds, against slices that torch cuts."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from adapters._plan import Cut, boxes
from adapters._shards import _parts, read_shards
from consensus.testing._threads import run_threads
from tests.threaded.muon_cases import shard, slice_of
from tests.unit.test_period import positions

SHAPES = ((7,), (5, 6), (6, 5), (4, 3, 5), (3, 4, 2, 6), (2, 1, 3), (1,), (3, 0, 2))


def cuts_of(shape: tuple[int, ...]) -> list[tuple[Cut, ...]]:
    """One cut and two, of every dim, among two and three ranks; at most one beyond the first."""
    single = [(Cut(dim, ranks),) for dim in range(len(shape)) for ranks in (2, 3)]
    pairs = [
        (Cut(one, 2), Cut(two, 3))
        for one, two in product(range(len(shape)), repeat=2)
        if 0 in (one, two) or one == two
    ]
    return [(), *single, *pairs]


CASES: list[tuple[tuple[int, ...], tuple[Cut, ...]]] = [
    (shape, cuts) for shape in SHAPES for cuts in cuts_of(shape)
]


def ids(cases: list[tuple[tuple[int, ...], tuple[Cut, ...]]]) -> list[str]:
    return [f"{shape} {[(cut.dim, cut.num_ranks) for cut in cuts]}" for shape, cuts in cases]


@pytest.mark.parametrize(("shape", "cuts"), CASES, ids=ids(CASES))
def test_runs_are_the_elements_of_the_box(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> None:
    elements = torch.arange(math.prod(shape)).view(shape)
    parts = _parts(shape, cuts)
    for part, box in zip(parts, boxes(shape, cuts), strict=True):
        own: Tensor = elements
        for dim, (start, length) in enumerate(box):
            own = own.narrow(dim, start if length else 0, length)
        assert positions(part).tolist() == own.flatten().tolist()
    assert sum(part.numel for part in parts) == elements.numel()


def test_a_number_without_dims_is_one_run() -> None:
    (part,) = _parts((), ())
    assert positions(part).tolist() == [0]


@pytest.mark.parametrize(
    ("shape", "cuts", "runs"),
    [
        ((6, 4), (Cut(0, 2),), 1),
        ((4, 3, 5), (Cut(0, 2),), 1),
        ((4, 3, 5), (Cut(1, 3),), 4),
        ((4, 3, 5), (Cut(2, 5),), 12),
        ((4, 3, 5), (Cut(0, 2), Cut(1, 3)), 2),
    ],
)
def test_runs_are_as_long_as_they_can_be(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], runs: int
) -> None:
    assert _parts(shape, cuts)[0].num_runs == runs


@pytest.mark.parametrize("cuts", [(Cut(1, 2), Cut(2, 2)), (Cut(0, 2), Cut(1, 2), Cut(2, 2))])
def test_cuts_of_two_inner_dims_are_refused(cuts: tuple[Cut, ...]) -> None:
    with pytest.raises(NotImplementedError, match=r"got cuts of \[1, 2\]"):
        _parts((4, 4, 4), cuts)


PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
    (Replicate(), Replicate()),
)


def facts(rank: int, placements: tuple[Placement, Placement]) -> list[str]:
    """What is wrong in a rank's account of some parameters, by torch's own."""
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for shape in ((6, 4), (5, 3, 2), (1, 2), (3, 3)):
        elements = torch.arange(float(math.prod(shape))).view(shape)
        shards = read_shards(nn.Parameter(shard(elements, mesh, placements)), name="p")
        own = slice_of(elements, mesh, placements)
        copies = [mesh.get_local_rank(i) for i, at in enumerate(placements) if at == Replicate()]
        if positions(shards.own).tolist() != own.flatten().tolist():
            found.append(f"elements of {shape}")
        if shards.is_first_copy is not (sum(copies) == 0):
            found.append(f"copy of {shape}")
        if float(shards.over_mesh(torch.ones(3))[1].sum()) != 3 * shards.is_first_copy:
            found.append(f"what a copy of {shape} adds")
        if sum(part.numel for part in shards.parts) != elements.numel():
            found.append(f"parts of {shape}")
        dims = {getattr(at, "dim", None) for at in placements}
        if shards.is_cut != tuple(dim in dims for dim in range(len(shape))):
            found.append(f"cuts of {shape}")
        if shards.shape != shape or shards.mesh_ranks != (0, 1, 2, 3):
            found.append(f"shape of {shape}")
        if len(shards.groups) != 2 - len(copies) or len(shards.mesh_groups) != 2:
            found.append(f"groups of {shape}")
    return found


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_rank_holds_what_torch_gives_it(placements: tuple[Placement, Placement]) -> None:
    assert run_threads(facts, 4, placements).values() == ([],) * 4


def alone(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(shard(torch.ones(4, 3), mesh, [Shard(0)]))
    shards = read_shards(param, name="p", alone=True)
    return shards.shape == (2, 3) and shards.groups == () and shards.own.numel == 6


def test_alone_a_shard_is_a_whole_tensor() -> None:
    assert run_threads(alone, 2).values() == (True, True)
