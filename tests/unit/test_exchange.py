"""What owners and holders of matrices send each other: all ranks here, one after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from adapters import _exchange
from adapters._data_phase import DataPhase
from adapters._exchange import Courier, joined, make_lines
from adapters._owners import Task
from adapters._parcels import Leg, Piece, Route, plan_route
from adapters._plan import Cut, Rectangle
from tests.unit.owner_cases import MIB, SHAPES, Place, rounds_of

Group: TypeAlias = tuple[int, ...]

AGE = 12345.0  # of the moments of rows, in steps; bfloat16 has no such number


@dataclass(frozen=True)
class Crew:
    """Ranks numbered copy by copy; the copies lie on mesh axes of these sizes."""

    cuts: tuple[Cut, ...]
    copies: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.copies, *(cut.num_ranks for cut in self.cuts))

    @property
    def ranks(self) -> range:
        return range(math.prod(self.sizes))

    def place(self, rank: int) -> Place:
        num_copies = math.prod(self.copies)
        num_parts = len(self.ranks) // num_copies
        return Place(self.cuts, num_copies, *divmod(rank, num_parts))

    def groups(self, rank: int) -> list[tuple[Group, int]]:
        """Along each axis the ranks that differ from this one only there, and its place."""
        found = []
        for axis, size in enumerate(self.sizes):
            step = math.prod(self.sizes[axis + 1 :])
            own = rank // step % size
            first = rank - own * step
            found.append((tuple(first + step * place for place in range(size)), own))
        return found


CREWS = (
    Crew((Cut(0, 2),)),
    Crew((Cut(0, 3),)),
    Crew((Cut(1, 4),)),
    Crew((Cut(0, 2), Cut(1, 2))),
    Crew((Cut(0, 2, 2), Cut(0, 2))),
    Crew((), copies=(3,)),
    Crew((Cut(0, 2),), copies=(2,)),
    Crew((Cut(1, 2),), copies=(3,)),
    Crew((Cut(0, 2),), copies=(2, 3)),
    Crew((Cut(0, 2), Cut(1, 2)), copies=(2, 2)),
)


@dataclass
class Post:
    """Carries parcels between ranks that run one after the other, again and again.

    In the first pass nobody's parcels are there yet. Each pass more of them are, as far as they
    depend on no others, until a pass sends what the last one did.
    """

    sent: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    changed: bool = True
    rank: int = 0
    calls: int = 0

    def carry(
        self, output: Tensor, given: Tensor, leg: Leg, group: Group, scratch: Tensor
    ) -> Callable[[], object]:
        parcels = [each.clone() for each in torch.split(given, list(leg.sent))]
        before = self.sent.get((self.rank, self.calls))
        self.changed |= before is None or not all(map(same_bits, before, parcels))
        self.sent[self.rank, self.calls] = parcels
        place = group.index(self.rank)
        got = [self.sent.get((peer, self.calls)) for peer in group]
        self.calls += 1

        def wait() -> None:
            targets = torch.split(output, list(leg.received))
            for target, parcel in zip(targets, got, strict=True):
                if parcel is not None:
                    target.copy_(parcel[place])  # which fails unless it has that size

        return wait

    def run(self, crew: Crew, program: Callable[[int], Any]) -> list[Any]:
        """Return what the program of each rank returns when nothing more changes."""
        found: list[Any] = []
        while self.changed:
            self.changed, found = False, []
            for rank in crew.ranks:
                self.rank, self.calls = rank, 0
                found.append(program(rank))
        return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where halves of float32 numbers are no bfloat16 numbers."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    made = Post()
    monkeypatch.setitem(_exchange.CARRIES, "all_to_all", made.carry)
    monkeypatch.setattr("torch.distributed.get_world_size", len)
    monkeypatch.setattr(_exchange, "exchange_device", lambda param: torch.device("cpu"))
    # What stands for a parameter is (crew, rank).
    monkeypatch.setattr(
        _exchange,
        "gather_groups",
        lambda at: [g for g, _ in at[0].groups(at[1])][len(at[0].copies) :],
    )
    monkeypatch.setattr(
        _exchange, "_copy_groups", lambda at: at[0].groups(at[1])[: len(at[0].copies)]
    )
    return made


def whole_of(position: int, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(position)
    return torch.randn(SHAPES[position], generator=generator) * factor


def rows_of(position: int, factor: float = 1.0) -> Tensor:
    return whole_of(position).square().mean(1) * factor


def part_of(whole: Tensor, part: Rectangle) -> Tensor:
    rows = slice(part.first_row, part.first_row + part.num_rows)
    return whole[rows, part.first_col : part.first_col + part.num_cols]


def fail() -> None:
    raise MemoryError("no memory left")


def courier_of(
    crew: Crew, rank: int, which: int, bucket_bytes: int, phase: DataPhase
) -> tuple[Courier, Route]:
    round_ = rounds_of(crew.place(rank), bucket_bytes=bucket_bytes)[which]
    route = plan_route(round_, crew.place(rank).number)
    at: Any = (crew, rank)
    lines = make_lines(round_, route, at, "all_to_all")
    # Stray memory, which must not be seen.
    memory, returned = (
        torch.full((numel,), math.nan, dtype=torch.bfloat16)
        for numel in (lines.numel, lines.num_returned)
    )
    return Courier(lines, memory, returned, phase), route


def pack(courier: Courier, task: Task, piece: Piece) -> None:
    first, number = piece.part.first_row, piece.part.num_rows
    age = torch.tensor([AGE])
    courier.pack(
        piece,
        [part_of(whole_of(position), piece.part) for position in task.positions],
        [torch.cat([rows_of(position)[first:][:number], age]) for position in task.positions]
        if task.with_rows
        else [],
    )


def bits(tensor: Tensor) -> list[int]:
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[tensor.dtype]
    return tensor.contiguous().view(kind).flatten().tolist()


def _has_heard(phase: DataPhase) -> bool:
    return any(bool(each) for each in phase._heard.values())


def exchange(
    crew: Crew, rank: int, which: int, bucket_bytes: int, fails: tuple[int, str] | None = None
) -> tuple[list[str], bool]:
    """What is wrong on this rank after a round of exchanges, and whether it has heard of it."""
    phase = DataPhase(tuple(crew.ranks))
    courier, route = courier_of(crew, rank, which, bucket_bytes, phase)
    for task, piece in route.gathered:
        pack(courier, task, piece)
    found = []
    if fails == (rank, "packing"):
        phase.attempt(fail)
    courier.to_owners()
    courier.at_owners()
    views = courier.views()
    for task, got, sent in route.owned:
        wholes, rows, ages = courier.assemble(task, got)
        if task.with_rows != (rows is not None) or task.with_rows != (ages is not None):
            found.append(f"whether rows of {task.positions} travel")
        if ages is not None and ages.tolist() != [AGE] * len(task.positions):
            found.append(f"ages of {task.positions}")
        if not wholes.is_contiguous():
            found.append(f"strides of {task.positions}")
        for i, position in enumerate(task.positions):
            if bits(wholes[i]) != bits(whole_of(position).bfloat16()):
                found.append(f"gathered {position}")
            if rows is not None and bits(rows[i]) != bits(rows_of(position)):
                found.append(f"rows of {position}")
        results = [whole_of(position, -2.0).bfloat16() for position in task.positions]
        moments = [rows_of(position, -3.0) for position in task.positions] * task.with_rows
        # Either way.
        courier.pack_result(sent, results if rank % 2 else torch.stack(results), moments)
    if fails == (rank, "computing"):
        phase.attempt(fail)
    courier.from_owners()
    courier.back_from_owners()
    for task, piece in route.returned:
        for position in task.positions:
            update, halves = views[position]
            if bits(update) != bits(part_of(whole_of(position, -2.0).bfloat16(), piece.part)):
                found.append(f"update of {position}")
            own = rows_of(position, -3.0)[piece.part.first_row :][: piece.part.num_rows]
            if bits(joined(halves)) != (bits(own) if task.with_rows and piece.part.numel else []):
                found.append(f"new rows of {position}")
    assert len(views) == sum(len(task.positions) for task, _ in route.returned)
    return found, _has_heard(phase)


@pytest.mark.parametrize("bucket_bytes", [300, MIB])
@pytest.mark.parametrize("crew", CREWS, ids=str)
def test_matrices_reach_their_owners_and_updates_come_back(
    crew: Crew, bucket_bytes: int, post: Post
) -> None:
    for which in range(len(rounds_of(crew.place(0), bucket_bytes=bucket_bytes))):
        post.changed = True
        post.sent.clear()
        found = post.run(crew, lambda rank: exchange(crew, rank, which, bucket_bytes))  # noqa: B023
        assert found == [([], False)] * len(crew.ranks)
        assert post.calls == 2 * len(crew.cuts) + len(crew.copies)


@pytest.mark.parametrize("crew", CREWS, ids=str)
def test_all_ranks_of_a_crew_hear_of_a_failure_on_any(crew: Crew, post: Post) -> None:
    some = crew.ranks[:: 1 + len(crew.ranks) // 5]  # of large crews
    for fails in itertools.product(some, ("packing", "computing")):
        post.changed = True
        post.sent.clear()
        found = post.run(crew, lambda rank: exchange(crew, rank, 0, MIB, fails))  # noqa: B023
        assert [heard for _, heard in found] == [True] * len(crew.ranks), fails
        # They had no fewer exchanges for it.
        assert post.calls == 2 * len(crew.cuts) + len(crew.copies)


def test_a_rank_that_failed_sends_zeros_and_no_other_rank_does(post: Post) -> None:
    crew = CREWS[1]
    post.run(crew, lambda rank: exchange(crew, rank, 0, MIB, (1, "packing")))
    for rank in crew.ranks:
        for parcel in post.sent[rank, 0]:
            assert parcel[-1] == (rank == 1)
            assert bool(parcel[:-1].any()) == (rank != 1 and len(parcel) > 1)
        for parcel in post.sent[rank, 1]:
            assert parcel[-1] == 1.0  # all have heard


# ---- float32 numbers that travel as bfloat16 ----

AWKWARD = (0.0, -0.0, 1 / 3, 1e-42, -1e38, float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_moments_of_rows_keep_their_bits_wherever_they_lie(offset: int) -> None:
    numbers = torch.tensor([*AWKWARD, 0.0])
    numbers.view(torch.int32)[-1] = 0x7FA0_1234  # a NaN with a payload, and a signalling one
    buffer = torch.zeros(offset + 2 * len(numbers), dtype=torch.bfloat16)
    buffer[offset:].copy_(numbers.view(torch.bfloat16))
    assert bits(joined(buffer[offset:])) == bits(numbers)


def test_no_moments_are_none() -> None:
    assert joined(torch.zeros(0, dtype=torch.bfloat16)).shape == (0,)


def test_only_a_part_with_the_start_of_its_rows_brings_their_moments() -> None:
    columns = Place((Cut(1, 2),))
    (round_,) = rounds_of(columns)
    for number in columns.numbers:
        for task, piece in plan_route(round_, number).gathered:
            along = task.with_rows and number == 0
            # And their age.
            each = piece.part.numel + 2 * (piece.part.num_rows + 1) * along
            assert piece.length == piece.count * each
