"""Gefen: AdamW with a momentum of one byte an element; and Muon with such a momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

import consensus
from adapters._gefen_muon_rule import GefenMuonRule
from adapters._gefen_rule import GefenRule
from adapters._newton_schulz import DEFAULT_EPS, ROW_BETA, ROW_EPS
from adapters._quantized import (
    FirstGradient,
    QuantizedOptimizer,
    check_first_gradient,
    check_refresh,
    period_rules,
)
from adapters._rules import Rule
from adapters._schedules import DEFAULT_COEFFICIENTS, DEFAULT_STEPS, Form
from adapters.options import (
    GefenOptions,
    MuonVariantOptions,
    ShardedMode,
    check_options,
    check_sharded_mode,
)


class Gefen(QuantizedOptimizer):
    """AdamW in about one byte of state for each parameter.

    The momentum of an element is one of 256 levels, times the largest magnitude in its block. The
    levels (the codebook) and the length of the blocks of each parameter are learned from the
    first gradients. The second moment is one number for each block; for a matrix, one for each
    row and each column.

    Sharded DTensors stay sharded. Codebook, block lengths and indices are those of one device
    whatever the number of ranks, exactly, given equal gradients: what is learned is learned from
    the whole tensors, by all ranks together, in integers. Second moments are sums of floats, so
    parameters agree with those of one device to about 1e-6 of their change in a step.

    A step writes nothing until all its collectives have returned and all updates are computed,
    which takes 5 bytes for each element on this rank while the step runs. What the first step has
    learned before it fails there stays learned, on all ranks. An exception between two of these
    collectives, such as running out of memory, is heard in the next one: then all raise. One after
    the last of them is found by the next step's agreement; with ``commit_vote = True`` on the
    optimizer, before anything is written.

    Args:
        params: Parameters, groups of them, or named parameters.
        lr: Learning rate, dimensionless; a number or a tensor of one element.
        betas: The shares of the old momentum and of the old second moment that are kept.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, in units of 1 / lr.
        force_1d_period_one: Give each element of vectors a magnitude of its own.
        force_2d_period_one: The same for matrices.
        period_one_substrings: The same for parameters with one of these in their names.
        factored_v_2d: Whether the second moment of a matrix is kept by row and column.
        codebook_refresh_every: Learn the codebook anew after this many steps; 0 is never.
        codebook_scope: A process group or mesh of ranks that share the codebook, beside those
            that share parameters; ``"auto"`` is only those. Plain parameters of the same name and
            shape on several of its ranks are copies and count once. Groups do not pickle: a copy
            of the optimizer has ``"auto"``.
        first_gradient: What a step does from whose gradients nothing can be learned (they are not
            finite, or all zeros): ``"raise"``, or ``"defer"`` to skip it on all ranks.
        control_group: The group to agree in. None derives it from the parameters' meshes.

    Raises:
        ValueError: An option is out of range, or a parameter is not real.
        NotImplementedError: A placement is not supported.

    Collectives:
        None at construction. In ``step``, if parameters are sharded or the scope has several
        ranks: one agreement; then, for each set of shards, at most two all_reduces of float32, of
        one number for each block that lies on several ranks, and for each column of a factored
        matrix. When something is learned, those of :mod:`adapters._learning` in addition.

    Source:
        Benedek, Koren, Fried, Gefen: Optimized Stochastic Optimizer,
        https://arxiv.org/abs/2606.13894 ; Gefen-X 0.5. Learning by all ranks together is our own.
    """

    _carried = ("codebook_refresh_every", "first_gradient", "_periods")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        force_1d_period_one: bool = False,
        force_2d_period_one: bool = False,
        period_one_substrings: Iterable[str] = (),
        factored_v_2d: bool = True,
        codebook_refresh_every: int = 0,
        codebook_scope: consensus.Source = "auto",
        first_gradient: FirstGradient = "raise",
        control_group: consensus.Source = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "factored_v_2d": factored_v_2d,
        }
        check_options(defaults, GefenOptions, "Gefen")
        self._periods = period_rules(
            force_1d_period_one, force_2d_period_one, period_one_substrings
        )
        self.codebook_refresh_every = check_refresh(codebook_refresh_every)
        self.codebook_scope = codebook_scope
        self.first_gradient = check_first_gradient(first_gradient)
        self.control_group = control_group
        super().__init__(params, defaults)

    def _make_rules(self) -> tuple[Rule, ...]:
        return (GefenRule(self._periods, refresh_every=self.codebook_refresh_every),)


class GefenMuon(QuantizedOptimizer):
    """Muon for matrices, with a momentum of one byte an element.

    See :class:`Gefen` for how a momentum is stored and learned, and :class:`adapters.Muon` for
    the update and its sharded modes. The momentum stays sharded like its parameter, so a rank
    keeps about one byte for each element that it holds.

    In the ``"exact"`` mode momenta are those of one device, exactly, and updates are those of one
    device but for the last bits of matrix products, which are equal too under the conditions that
    :class:`adapters.Muon` states. In the ``"approx"`` mode each rank learns from, and keeps, its
    own shards alone, without communication.

    Args:
        params: Parameters of two dimensions, groups of them, or named parameters.
        lr: Learning rate, dimensionless; a number or a tensor of one element.
        weight_decay: Decoupled weight decay, in units of 1 / lr.
        momentum: The share of the old momentum that is kept, dimensionless.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: (a, b, c) of the Newton-Schulz polynomial, where there is no schedule.
        eps: The least norm that Newton-Schulz divides by.
        ns_steps: Number of Newton-Schulz iterations, where there is no schedule; below 100.
        ns_schedule: The name of a schedule (``"you5"``, ``"polar5"``, ``"deepseek10"``,
            ``"tuned4"``, ``"tuned3"``) or a list of (a, b, c), one for each iteration; None and
            ``"standard"`` use the arguments above.
        adjust_lr_fn: ``"original"`` (the same as None) or ``"match_rms_adamw"``.
        sharded_mode: ``"exact"``, ``"distributed"`` or ``"approx"``; equal on all ranks.
        ns_form: ``"standard"``, or ``"gram"`` for fewer products; see :class:`adapters.Muon`.
        normuon: Whether to divide the rows of updates by a running root mean square of theirs.
            Takes four bytes for each row of the whole matrix, on every rank.
        normuon_beta2: The share of the old row moment that is kept.
        normuon_eps: Added to the root of the row moment.
        cautious: Whether to leave out elements of updates that point against the gradient.
        codebook_refresh_every: As in :class:`Gefen`.
        codebook_scope: As in :class:`Gefen`.
        first_gradient: As in :class:`Gefen`.
        control_group: The group to agree in. None derives it from the parameters' meshes.

    Raises:
        ValueError: An option is out of range, or a parameter has not two dimensions.
        NotImplementedError: A placement or a mode is not supported.

    Collectives:
        None at construction. In ``step``, if parameters are sharded and the mode is exact: one
        agreement, an all_reduce where blocks lie on several ranks, and those of
        :class:`adapters.Muon`. When something is learned, those of :mod:`adapters._learning`.

    Source:
        Gefen-X 0.5; Benedek, Koren, Fried, https://arxiv.org/abs/2606.13894 ; Jordan 2024,
        https://kellerjordan.github.io/posts/muon/ .
    """

    _carried = ("sharded_mode", "codebook_refresh_every", "first_gradient")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = DEFAULT_COEFFICIENTS,
        eps: float = DEFAULT_EPS,
        ns_steps: int = DEFAULT_STEPS,
        ns_schedule: str | list[tuple[float, float, float]] | None = None,
        adjust_lr_fn: str | None = None,
        *,
        sharded_mode: ShardedMode = "exact",
        ns_form: Form = "standard",
        normuon: bool = False,
        normuon_beta2: float = ROW_BETA,
        normuon_eps: float = ROW_EPS,
        cautious: bool = False,
        codebook_refresh_every: int = 0,
        codebook_scope: consensus.Source = "auto",
        first_gradient: FirstGradient = "raise",
        control_group: consensus.Source = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_schedule": ns_schedule,
            "adjust_lr_fn": adjust_lr_fn,
            "normuon": normuon,
            "normuon_beta2": normuon_beta2,
            "normuon_eps": normuon_eps,
            "cautious": cautious,
        }
        if ns_form != "standard":
            defaults["ns_form"] = ns_form
        check_options(defaults, MuonVariantOptions, "GefenMuon")
        self.sharded_mode = check_sharded_mode(sharded_mode)
        self.codebook_refresh_every = check_refresh(codebook_refresh_every)
        self.codebook_scope = codebook_scope
        self.first_gradient = check_first_gradient(first_gradient)
        self.control_group = control_group
        super().__init__(params, defaults)

    def _make_rules(self) -> tuple[Rule, ...]:
        return (GefenMuonRule(self.sharded_mode, refresh_every=self.codebook_refresh_every),)
