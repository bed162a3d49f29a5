"""Replay a captured step only when all ranks hold what was captured.

See [Note: a graph holds what the host decided] in ``_capture``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from torch.optim import Optimizer

from consensus import _capture, _seams
from consensus._compile import untraced
from consensus.agree import hold, same_fact
from consensus.errors import EnclosureError
from consensus.groups import ControlGroup, control_group
from consensus.vote import Fact, Vote

PHASE = "CapturedStep.replay"


class Replayable(Protocol):
    """A captured graph: ``torch.cuda.CUDAGraph``, or whatever else replays."""

    def replay(self) -> object:
        """Run what was captured once more."""


class CapturedStep:
    """A captured CUDA graph whose replays all ranks agree on.

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train_step(static_input)      # ends in optimizer.step()
        step = consensus.CapturedStep(graph, optimizer)
        for batch in batches:
            static_input.copy_(batch)
            step.replay()

    A graph holds options as the numbers, and tensors as the addresses, that they had. A learning
    rate that a scheduler sets to another number, a parameter, gradient or state tensor that was
    replaced (by ``load_state_dict``, or ``zero_grad(set_to_none=True)``): each would be passed over
    in silence. Here a replay is refused, on all ranks, and nothing runs. What is a tensor on the
    graph's device may change its value: keep a learning rate there that should be scheduled.

    What a replay itself meets, an overflow for one, is decided on the device. A rank that fails
    amid a replay cannot be helped, like one that fails in a backward pass. Not run on a GPU yet.

    Args:
        graph: The captured graph; nothing is asked of it but ``replay()``.
        optimizers: The optimizer that was stepped in it, or all that were. What they hold is
            noted in their captured step, or else, where it did not go through
            :class:`preflight`, now: make this right after the capture.
        timeout: Hard deadline of an agreement in seconds; None is the group's own.

    Raises:
        EnclosureError: Several optimizers agree in different groups.

    Collectives:
        None at construction. In ``replay`` one message of 2 int64 on the optimizers' control group,
        reduced by maximum, when all ranks are ready; two more when not. None of its own when
        nothing is distributed.
    """

    def __init__(
        self,
        graph: Replayable,
        optimizers: Optimizer | Iterable[Optimizer],
        *,
        timeout: float | None = None,
    ) -> None:
        """Note what the graph holds of the optimizers."""
        alone = isinstance(optimizers, Optimizer)
        self.optimizers: tuple[Optimizer, ...] = (
            (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
        )
        if not self.optimizers:
            raise ValueError("expected the optimizers that were stepped in the graph; got none")
        self._labels = [
            "" if alone else f"{type(each).__name__}, number {number}: "
            for number, each in enumerate(self.optimizers)
        ]
        self._graph = graph
        self._timeout = timeout
        self._held = [_capture.take_captured(each) for each in self.optimizers]
        self._group = _common_group(self.optimizers)
        self._num_replays = 0

    @untraced
    def replay(self) -> None:
        """Replay the graph on all ranks, or raise on all.

        Raises:
            GroupFailure: On every rank, when something that a graph holds has changed on any, or
                one failed elsewhere in the meantime.
            Disagreement: On every rank, when ranks differ in what they hold otherwise, or in how
                often they have replayed.
            RuntimeError: Unwrapped, when nothing is distributed and something has changed.
            LateRanks: A rank did not come.

        Collectives:
            See the class; then those that were captured. Every rank must call.
        """
        problem: Exception | None = None
        facts: tuple[Fact, ...] = ()
        try:
            _seams.reach(PHASE)
            self._expect_no_change()
            facts = self._facts()
        except Exception as found:  # told to the peers, then raised
            problem = found
        if not self._group.is_local:
            self._group.connect(self._timeout)
            hold(self._group, Vote(PHASE, facts=facts), error=problem, timeout=self._timeout)
        elif problem is not None:
            raise problem
        self._num_replays += 1
        self._graph.replay()

    def _expect_no_change(self) -> None:
        changes = [
            f"{label}{line}"
            for label, held, optimizer in zip(
                self._labels, self._held, self.optimizers, strict=True
            )
            for line in held.changes(_capture.Held.of(optimizer))
        ]
        if changes:
            raise RuntimeError(
                f"the graph still holds what was captured, and would pass over: "
                f"{'; '.join(changes)}. Nothing was replayed. Undo it, or capture again."
            )

    def _facts(self) -> tuple[Fact, ...]:
        """Return what must be equal on all ranks; nothing of it has changed on this one."""
        facts = [same_fact("replays made", self._num_replays)]
        for label, optimizer in zip(self._labels, self.optimizers, strict=True):
            manifest = control_group(optimizer).manifest
            if manifest is not None:
                held = manifest.facts(optimizer.param_groups, manifest.gradients())
                facts += [replace(fact, name=f"{label}{fact.name}") for fact in held]
        return tuple(facts)


def _common_group(optimizers: Iterable[Optimizer]) -> ControlGroup:
    """Return the group in which all of them agree; a local one if none has peers."""
    groups = [control_group(each) for each in optimizers]
    shared = [group for group in groups if not group.is_local]
    for group in shared[1:]:
        if group.channel is not shared[0].channel or group.ranks != shared[0].ranks:
            raise EnclosureError(
                f"the optimizers of one graph agree in different groups, of ranks "
                f"{list(shared[0].ranks)} and {list(group.ranks)}; give each of them the same "
                "control_group, and make a step with all of them before the capture"
            )
    return (shared or groups)[0]


__all__ = ["CapturedStep", "Replayable"]
