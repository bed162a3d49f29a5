"""One rank's model, optimizers and data, and one training step under two agreements."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

import consensus
from consensus._clock import VoteClock
from consensus.demo._model import (
    CONTEXT,
    CharacterTransformer,
    build_model,
    hidden_matrices,
    other_parameters,
)
from consensus.demo._settings import OPTIMIZERS
from consensus.demo._text import Vocabulary, sample_batch

BATCH = 8  # excerpts a rank and step
SEED = 20
PREPARE_S = 60.0  # for planning, which waits for the slowest rank to build its model


@dataclass(slots=True)
class Worker:
    """What one rank trains with."""

    rank: int
    model: CharacterTransformer
    main: Optimizer  # of the hidden matrices, or of all; its step holds an agreement
    rest: AdamW | None  # of everything else, if anything is left
    tokens: Tensor  # (characters,), int64
    generator: torch.Generator  # of this rank's batches, apart from torch's own
    clock: VoteClock
    after_backward: list[Callable[[], None]] = field(default_factory=list)  # faults reach in here
    overflow: bool = False  # this step must not be taken

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers, in the order they step."""
        return (self.main,) if self.rest is None else (self.main, self.rest)


def build_worker(rank: int, text: str, optimizer: str) -> Worker:
    """Return this rank's part of a freshly built and sharded model.

    Collectives:
        Those of planning (see :meth:`consensus.ControlGroup.prepare`). Every rank must call.
    """
    vocabulary = Vocabulary.of(text)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model(len(vocabulary), mesh, seed=SEED)
    choice = OPTIMIZERS[optimizer]
    main, rest = list(model.named_parameters()), None
    if not choice.whole_model:
        main, rest = list(hidden_matrices(model)), AdamW(list(other_parameters(model)), lr=3e-3)
    agreeing = load_optimizer(optimizer)(main, lr=choice.lr, weight_decay=0.0)
    channel = consensus.control_group(agreeing).prepare(PREPARE_S).channel
    if channel is None:
        raise AssertionError("sharded parameters have no control group")
    generator = torch.Generator().manual_seed(SEED + rank)
    tokens = vocabulary.encode(text)
    return Worker(rank, model, agreeing, rest, tokens, generator, VoteClock(channel))


def load_optimizer(name: str) -> Callable[..., Optimizer]:
    """Return the optimizer class of this name.

    Raises:
        ValueError: The package that holds it cannot be imported.
    """
    module, _, attribute = OPTIMIZERS[name].path.partition(":")
    try:
        found: Callable[..., Optimizer] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"optimizer {name!r} is {attribute} of package {module!r}, which cannot be imported "
            f"({error}); install step-consensus, which brings it along"
        ) from error
    return found


def train_step(worker: Worker) -> float:
    """Train on this rank's next batch; return its loss in nats a character.

    Collectives:
        Those of FSDP2's forward and backward, one agreement before anything is written, those of
        the update, and one agreement at the end. Every rank must call.
    """
    inputs, targets = sample_batch(
        worker.tokens, batch=BATCH, context=CONTEXT, generator=worker.generator
    )

    def closure() -> Any:
        for optimizer in worker.optimizers:
            optimizer.zero_grad()
        loss = worker.model(inputs, targets)
        loss.backward()
        for reach_in in worker.after_backward:
            reach_in()
        return loss

    with consensus.fail_together("train step", worker.main):
        # First the optimizer that agrees: when it raises, nothing has been written.
        loss: Any = worker.main.step(closure)
        if worker.rest is not None and not worker.overflow:
            worker.rest.step()
    return float(loss.detach())
