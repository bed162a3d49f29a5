"""A rank that fails amid collectives of the data plane: what it sees, and what its peers see.

More of FSDP2 is in test_train_step. All cases are in one run, two ranks each.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from consensus import GroupFailure, fail_together
from tests.gloo._cases import caught, cause_of, on_ranks
from tests.gloo.wrapped_cases import Place, Wrapped, Wrapper

pytestmark = pytest.mark.slow

PATIENCE_S = 1.0  # how long a rank that failed waits for peers that cannot come

STRANDED: tuple[tuple[Wrapper, Place], ...] = (
    ("fully_shard", "start"),
    ("fully_shard", "clip"),
    ("DDP", "start"),
    ("DDP", "forward"),
    ("DDP", "backward"),
    ("TP", "start"),
    ("TP", "forward"),
    ("TP", "backward"),
    ("TP", "clip"),
)


@dataclass(frozen=True)
class Seen:
    text: str
    failed: tuple[int, ...]
    late: tuple[int, ...]
    recoverable: bool
    cause: str | None
    moved: bool  # whether parameters or optimizer state changed


def bad() -> None:
    raise ValueError("bad data")


def one_of_two_fails(rank: int) -> Seen:
    """Ranks 2 i and 2 i + 1 meet case i, the second of them fails."""
    mesh = init_device_mesh("cpu", (len(STRANDED), 2), mesh_dim_names=("case", "data"))
    wrapper, place = STRANDED[rank // 2]
    trained = Wrapped.on(mesh["data"], wrapper)
    trained.step()
    before = trained.numbers()

    def step() -> None:
        with fail_together("forward and backward", trained.scope, timeout=PATIENCE_S):
            trained.backward({place: bad} if rank % 2 else {})
        trained.optimizer.step()

    error = caught(step)
    assert isinstance(error, GroupFailure), error
    after = trained.numbers()
    return Seen(
        str(error),
        tuple(failure.rank for failure in error.failures),
        error.late_ranks,
        error.recoverable,
        cause_of(error),
        any(not one.equal(other) for one, other in zip(before, after, strict=True)),
    )


def test_one_rank_fails_while_its_peer_waits_for_it_in_a_collective() -> None:
    """Nobody waits for the timeout of the data plane: it is longer than this run may take."""
    seen = on_ranks(one_of_two_fails, 2 * len(STRANDED))
    for case, (peer, failing) in enumerate(zip(seen[::2], seen[1::2], strict=True)):
        own = 2 * case + 1
        reason = f"rank {own}: ValueError: bad data"
        assert failing.cause == "ValueError: bad data", (STRANDED[case], failing)
        assert (failing.failed, failing.late) == ((own,), (own - 1,)), STRANDED[case]
        assert reason in peer.text.splitlines()[1], (STRANDED[case], peer)
        for each in (peer, failing):
            assert reason in each.text
            assert not each.recoverable, STRANDED[case]
            assert "restart" in each.text or "did not come about" in each.text
            assert not each.moved


def group_of_no_parameter(rank: int) -> list[bool]:
    """Rank 0 is a collective ahead, in a group that no mesh of the parameters holds."""
    trained = Wrapped.on(init_device_mesh("cpu", (2,)), "TP")
    other = dist.new_group([0, 1])
    assert other not in trained.mesh.get_all_groups()
    if rank == 0:
        ahead = dist.all_reduce(torch.ones(1), group=other, async_op=True)
    seen = []
    for source in (trained.optimizer, [trained.optimizer, other]):

        def fail() -> None:
            with fail_together("train step", source):  # noqa: B023
                bad()

        error = caught(fail)
        assert isinstance(error, GroupFailure), error
        seen.append(error.recoverable)
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=other)
    else:
        ahead.wait()
    return seen


def test_a_group_that_holds_no_parameter_is_compared_when_it_is_named() -> None:
    assert on_ranks(group_of_no_parameter, 2) == ([True, False],) * 2


def one_of_a_grid_fails(rank: int) -> list[bool]:
    """Rank 3 of 2 x 2 fails, after unequal numbers of collectives along the two axes."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    params = [
        torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), grid[axis], [Shard(0)]))
        for axis in ("replica", "shard")
    ]
    optimizer = torch.optim.SGD(params)
    along = grid["replica"].get_group()
    dist.all_reduce(torch.ones(1), group=along)

    def fails() -> None:
        with fail_together("forward", optimizer):
            if rank == 3:
                bad()

    def is_recoverable() -> bool:
        error = caught(fails)
        assert isinstance(error, GroupFailure)
        return error.recoverable

    found = [is_recoverable()]
    ahead = dist.all_reduce(torch.ones(1), group=along, async_op=True) if rank == 0 else None
    found.append(is_recoverable())
    if ahead is None:
        dist.all_reduce(torch.ones(1), group=along)
    else:
        ahead.wait()
    found.append(is_recoverable())
    return found


def test_axes_of_a_mesh_are_told_apart_where_ranks_compare_how_far_they_are() -> None:
    assert on_ranks(one_of_a_grid_fails, 4) == ([True, False, True],) * 4
