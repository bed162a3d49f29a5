"""Muon for sharded parameters: the bits of one device, or each shard on its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

import consensus
from adapters._base import VotingOptimizer
from adapters._muon_rule import MuonRule
from adapters._newton_schulz import DEFAULT_EPS, ROW_BETA, ROW_EPS
from adapters._rules import Rule
from adapters._schedules import DEFAULT_COEFFICIENTS, DEFAULT_STEPS, Form
from adapters.options import MuonVariantOptions, ShardedMode, check_options, check_sharded_mode


class Muon(VotingOptimizer):
    """Muon as in :class:`torch.optim.Muon`, also for parameters that are sharded DTensors.

    A drop-in for torch's class: the same arguments, defaults and order, the same options in the
    parameter groups, the same ``momentum_buffer``; state dicts load in both directions. Without
    sharded parameters it gives the same bits, and communicates nothing.

    ``sharded_mode="exact"``: on every rank each matrix is gathered whole, orthogonalised, and cut
    again. All ranks compute the same, which is redundant, and what they compute is what one
    device computes, bit for bit: for float32 parameters, with the same number of threads, the
    same torch build, and contiguous matrices. With bfloat16 parameters an element may differ in
    its last bit, since torch's CPU kernels round the tail of a tensor in another way and shards
    end elsewhere. Rows, columns, uneven and empty shards, HSDP, and FSDP over tensor parallelism
    are supported.

    ``sharded_mode="distributed"``: each matrix has one owner, to which every rank sends its shard
    once, in bfloat16 (Newton-Schulz starts with that cast); the owner computes, and sends each rank
    its part of the update once. The bits are those of ``"exact"``, for float32 parameters. Owners
    are chosen over all ranks that hold a shard or a copy of one, the largest matrix first to the
    rank with least to do, so on a mesh of copies no matrix is computed twice. A rank that fails
    while it packs or computes takes part in the exchanges to their end and says so in them: then
    all ranks raise, and none has written.

    ``sharded_mode="approx"``: each shard is orthogonalised as if it were a matrix of its own,
    without communication and without agreement. This is another algorithm: its result depends on
    how many ranks there are. Only the learning rate still follows the whole matrix's shape.

    One thing differs from torch on purpose. With bfloat16 gradients and ``nesterov=False`` torch
    orthogonalises the momentum buffer in place, and so normalises it at each step. Here the buffer
    stays the average of the gradients.

    A step writes nothing until all its collectives have returned and all updates are computed; an
    exception before that leaves parameters and state as they were, and is heard by all ranks that
    take part in a later exchange of the step: they raise too. (One that is raised after the last
    exchange, as in the exact mode while the last bucket is computed, is found by the next step's
    agreement; with ``commit_vote = True`` on the optimizer, before anything is written.) It costs
    memory while the step runs: 2 bytes for each element of this rank's shards, and for one bucket
    at a time (three on GPUs in the distributed mode) the gathered matrices with the temporaries of
    those that are computed together: one, or a batch of small ones. When
    gradients are unscaled in the step, there is a copy of this rank's gradients as well. Between
    steps there is one momentum buffer, sharded like its parameter.

    Args:
        params: Parameters of two dimensions, groups of them, or named parameters. Give biases,
            embeddings and heads to another optimizer.
        lr: Learning rate, dimensionless; a number or a tensor of one element.
        weight_decay: Decoupled weight decay, in units of 1 / lr.
        momentum: The share of the old momentum that is kept, dimensionless.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: (a, b, c) of the Newton-Schulz polynomial, dimensionless.
        eps: The least norm that Newton-Schulz divides by.
        ns_steps: Number of Newton-Schulz iterations, below 100.
        adjust_lr_fn: ``"original"`` (the same as None) or ``"match_rms_adamw"``.
        sharded_mode: ``"exact"``, ``"distributed"`` or ``"approx"``; equal on all ranks.
        ns_schedule: The name of a schedule (``"you5"``, ``"polar5"``, ``"deepseek10"``,
            ``"tuned4"``, ``"tuned3"``) or a list of (a, b, c), one for each iteration; None uses
            the arguments above. For new runs ``"you5"`` costs what the default costs and comes
            closer to an orthogonal matrix.
        ns_form: ``"standard"``, or ``"gram"``: the same polynomial with fewer products, for
            matrices at least twice as long as wide (others are computed in the standard form).
            For 1 : 4 a fifth fewer multiplications, as close to orthogonal; not torch's bits.
        normuon: Whether to divide the rows of updates by a running root mean square of theirs.
        normuon_beta2: The share of the old row moment that is kept.
        normuon_eps: Added to the root of the row moment.
        cautious: Whether to leave out elements of updates that point against the gradient.
        capturable: Whether ``step`` may be captured in a CUDA graph, without parameters that are
            sharded or with ``sharded_mode="exact"``, and without ``normuon`` and ``cautious``. An
            overflow that GradScaler finds is then left to the step, which masks its writes. Make a
            step before the capture, keep ``lr`` in a tensor on the device if it is to change, and
            replay through :class:`consensus.CapturedStep`. Not run on a GPU yet.
        control_group: The group to agree in. None derives it from the parameters' meshes.

    Attributes:
        bucket_bytes: Upper limit for the whole matrices that a rank puts together at a time, in
            bytes as bfloat16; None for 16 MiB, and 2 MiB on CPUs. Set before a step, equal on all
            ranks, as are the next two.
        transport: How shards travel to owners: ``"all_to_all"``, or, where that is unreliable,
            ``"p2p"`` or ``"gather"``.
        commit_vote: Whether ranks agree once more before anything is written; False.

    Raises:
        ValueError: An option is out of range, or a parameter has not two dimensions.
        NotImplementedError: A placement or a mode is not supported.

    Collectives:
        None at construction. In ``step``, if parameters are sharded and the mode is exact: one
        agreement, then for each bucket of matrices one all_gather for each mesh axis that cuts
        them. A bucket holds up to ``bucket_bytes`` of whole matrices that have the same placement.
        In the distributed mode it holds as much for each owner, and has one all_to_all for each
        axis that cuts, to the owners and back, and one more for each axis that copies; if matrices
        live on several meshes, a second agreement before anything is written.

    Source:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/ ; torch.optim.Muon, torch 2.13.
    """

    _carried = ("sharded_mode",)

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
        adjust_lr_fn: str | None = None,
        *,
        sharded_mode: ShardedMode = "exact",
        ns_schedule: str | list[tuple[float, float, float]] | None = None,
        ns_form: Form = "standard",
        normuon: bool = False,
        normuon_beta2: float = ROW_BETA,
        normuon_eps: float = ROW_EPS,
        cautious: bool = False,
        capturable: bool = False,
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
            "adjust_lr_fn": adjust_lr_fn,
        }
        # What torch's class does not have stands in the groups only if it is asked for.
        if ns_schedule is not None:
            defaults["ns_schedule"] = ns_schedule
        if ns_form != "standard":
            defaults["ns_form"] = ns_form
        if normuon or (normuon_beta2, normuon_eps) != (ROW_BETA, ROW_EPS):
            defaults |= {
                "normuon": normuon,
                "normuon_beta2": normuon_beta2,
                "normuon_eps": normuon_eps,
            }
        if cautious:
            defaults["cautious"] = cautious
        if capturable:
            defaults["capturable"] = capturable
        check_options(defaults, MuonVariantOptions, "Muon")
        self.sharded_mode = check_sharded_mode(sharded_mode)
        self.control_group = control_group
        super().__init__(params, defaults)

    def _make_rules(self) -> tuple[Rule, ...]:
        return (MuonRule(self.sharded_mode, options=MuonVariantOptions),)
