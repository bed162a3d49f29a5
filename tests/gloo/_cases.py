"""What these tests share: a sharded Muon beside an unsharded twin, and what a rank met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

import consensus
from adapters import Muon
from consensus._transport import Link
from consensus._waiting import Patience
from consensus.testing import assert_unchanged, run_ranks, snapshot
from consensus.testing._ranks import ErrorRecord
from tests.threaded.muon_cases import Case, Twins, named, torchs_muon

SHAPES = ((6, 4), (4, 6), (5, 3))
ROWS: tuple[Placement, ...] = (Shard(0),)

# What older versions of torch lack.
needs_fsdp_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="needs an FSDP2 that can be reset"
)
needs_list_keys = pytest.mark.skipif(
    not hasattr(Store, "list_keys"), reason="needs a store that lists its keys"
)

# A run that takes longer hangs. Ranks would wait longer still in a collective, so that none is
# released early by a timeout of the data plane.
LIVENESS_S = 40.0
DATA_PLANE_S = 120.0


@dataclass
class Trained:
    """A sharded Muon, and torch's on whole matrices, which get the same gradients."""

    twins: Twins
    optimizer: Muon
    reference: torch.optim.Optimizer
    seed: int = 0

    @classmethod
    def on(
        cls,
        mesh: DeviceMesh | None = None,
        *,
        shape: tuple[int, ...] = (2,),
        placements: tuple[Placement, ...] = ROWS,
        shapes: tuple[tuple[int, int], ...] = SHAPES,
        **options: Any,
    ) -> Trained:
        twins = Twins.of(Case("", shape, placements, shapes), mesh)
        whole = {k: v for k, v in options.items() if k not in ("sharded_mode", "control_group")}
        return cls(twins, Muon(named(twins.sharded), **options), torchs_muon(twins.whole, **whole))

    def give_gradients(self, *, skip: Sequence[int] = ()) -> None:
        self.seed += 1
        self.twins.set_gradients(self.seed, skip=skip)

    def healthy_step(self) -> None:
        """Step both with new gradients."""
        self.give_gradients()
        self.optimizer.step()
        self.reference.step()

    def differences(self) -> list[str]:
        """Return what is not as on one device, which should be nothing."""
        return self.twins.differences(self.optimizer, self.reference)


@dataclass(frozen=True)
class Met:
    """What one rank met in a step that should not take place, and what came after."""

    error: BaseException | None
    cause: str | None = None  # of the error, as text: causes do not travel between processes
    changed: str = ""  # what the step should have left alone
    left: tuple[str, ...] = ()  # AMP controls that the next step would find
    then: tuple[str, ...] = ()  # what was wrong in or after the next, healthy step

    @property
    def text(self) -> str:
        """The first line, which is the same on every rank."""
        return f"{type(self.error).__name__}: {self.error}"


def on_ranks(worker: Callable[..., Any], world_size: int, *args: object) -> tuple[Any, ...]:
    """Return what each rank returns; a rank that hangs or fails fails the test, with its stack."""
    ranks = run_ranks(worker, world_size, *args, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S)
    return ranks.values()


def form_group(rank: int, folder: str, number: int) -> None:
    """Form the default group of two ranks, the ``number``-th one, over a file of its own."""
    dist.init_process_group(
        "gloo",
        store=FileStore(f"{folder}/{number}", 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LIVENESS_S),
    )


def caught(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def cause_of(error: BaseException | None) -> str | None:
    cause = ErrorRecord.of(error).cause if error is not None else None
    return f"{cause.type_name}: {cause.message}" if cause is not None else None


def refused(
    trained: Trained,
    call: Callable[[], object],
    *,
    gradients: bool = True,
    undo: Callable[[], object] = lambda: None,
) -> Met:
    """Make a step that should not take place, see that nothing changed, then a healthy one."""
    before = snapshot(trained.optimizer, gradients=gradients)
    error = caught(call)
    changed = caught(lambda: assert_unchanged(trained.optimizer, before))
    left = {"found_inf", "grad_scale"} & set(vars(trained.optimizer))
    undo()
    then = caught(lambda: trained.healthy_step())
    return Met(
        error,
        cause_of(error),
        str(changed or ""),
        tuple(sorted(left)),
        (f"{type(then).__name__}: {then}",) if then else tuple(trained.differences()),
    )


@dataclass
class Recorder:
    """Passes on what goes over a control group's link, and remembers how many words it was."""

    link: Link
    device: torch.device
    words: list[int] = field(default_factory=list)  # of messages reduced by maximum
    sums: list[int] = field(default_factory=list)  # of those reduced by sum
    lowest: int = 0

    @classmethod
    def on(cls, source: Any) -> Recorder:
        channel = consensus.control_group(source).prepare().channel
        assert channel is not None
        recorder = channel.link = cls(channel.link, channel.link.device)
        return recorder

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        self.words.append(len(words))
        self.lowest = min(self.lowest, *words)
        return self.link.all_reduce_max(words, patience)

    def all_reduce_sum(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        self.sums.append(len(words))
        return self.link.all_reduce_sum(words, patience)

    def close(self) -> None:
        self.link.close()


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 6, bias=False))


def tell(word: str) -> None:
    """Set a word in the job's store; with :func:`wait_for` it orders ranks without a sleep."""
    _get_default_store().set(word, "1")


def wait_for(word: str) -> None:
    _get_default_store().wait([word], timedelta(seconds=LIVENESS_S))
