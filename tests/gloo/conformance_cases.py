"""torch's AdamW with steps that agree, or that go wrong in ways the laws must find."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

import consensus
from tests.threaded.muon_cases import local


class GuardedAdamW(torch.optim.AdamW):
    """torch's AdamW with the step that docs/testing.md shows."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        with consensus.preflight(self) as vote:
            loss = vote.closure(closure)
        if vote.skip:
            return loss
        if vote.inv_scale is not None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(vote.inv_scale)
            self.grad_scale = self.found_inf = None  # AdamW must not see them
        super().step()
        return loss


class VotingAdamW(torch.optim.AdamW):
    """torch's AdamW with no more than the README shows."""

    def step(self, closure: Any = None) -> Any:
        with consensus.preflight(self) as vote:
            loss = vote.closure(closure)
        if not vote.skip:
            super().step()
        return loss


class SkipsTogether(torch.optim.AdamW):
    """All ranks leave out a step if one of them finds a NaN."""

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        sharded = [param for param in params if isinstance(param, DTensor)]
        found = any(not local(param.grad).isfinite().all() for param in sharded)
        if sharded and consensus.any_failed(found, self):
            return None
        return super().step(closure)


class Scaled(GuardedAdamW):
    """The same, but it forgets that its gradients are scaled."""

    def step(self, closure: Any = None) -> Any:
        with consensus.preflight(self) as vote:
            loss = vote.closure(closure)
        if not vote.skip:
            self.grad_scale = self.found_inf = None
            torch.optim.AdamW.step(self)
        return loss


class SkipsAlone(torch.optim.AdamW):
    """A rank that finds a NaN leaves its step out, or only the shard that has it."""

    whole = True

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        sharded = [param for param in params if isinstance(param, DTensor)]
        broken = [param for param in sharded if not local(param.grad).isfinite().all()]
        if self.whole and broken:
            return None
        for param in broken:
            param.grad = None
        return super().step(closure)


class SkipsAShard(SkipsAlone):
    """The other way."""

    whole = False
