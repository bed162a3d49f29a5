"""One optimizer for a whole model: Muon for its hidden matrices, another rule for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

import consensus
from adapters._adamw_rule import AdamWRule
from adapters._gefen_muon_rule import GefenMuonRule
from adapters._gefen_rule import GefenRule
from adapters._muon_rule import MuonRule
from adapters._newton_schulz import DEFAULT_EPS, ROW_BETA, ROW_EPS
from adapters._quantized import (
    FirstGradient,
    QuantizedOptimizer,
    check_first_gradient,
    check_refresh,
    period_rules,
)
from adapters._routing import (
    DEFAULT_BACKUP_SUBSTRINGS,
    Route,
    check_covers,
    decays,
    listing,
    route_lists,
    route_model,
    route_named,
)
from adapters._rules import Rule
from adapters._schedules import DEFAULT_COEFFICIENTS, Form
from adapters.options import MuonVariantOptions, ShardedMode, check_options, check_sharded_mode

NamedParams: TypeAlias = Iterable[tuple[str, Tensor]]
MuonKind = Literal["gefen", "dense"]
BackupKind = Literal["gefen", "adamw"]


class Hybrid(QuantizedOptimizer):
    """Muon for the hidden matrices of a model, Gefen or AdamW for everything else.

    One optimizer: its groups and its state are its own, schedulers and hooks work as with any
    other, and a step takes one agreement for both halves. Neither half writes before both have
    computed, so either both step or neither does. ``print(optimizer)`` lists which parameter went
    where, and why.

    Give it a model (:meth:`from_model`), named parameters, or two lists. Matrices go to Muon
    unless they belong to an embedding, are tied to one, or have a name that says head, embedding
    or classifier. A group's ``use_muon`` says which half it belongs to.

    Args:
        muon_params: A model, named parameters to divide, or the named parameters for Muon.
        backup_params: The named parameters for the other half, if the first are Muon's alone.
        lr: Learning rate of both halves, dimensionless.
        muon_lr: That of the Muon half, if it is another.
        backup_lr: That of the backup half, if it is another.
        weight_decay: Decoupled weight decay of both halves, in units of 1 / lr.
        muon_weight_decay: That of the Muon half, if it is another.
        backup_weight_decay: That of the backup half, if it is another.
        no_decay_substrings: Backup parameters with one of these in their names do not decay.
        backup_substrings: Matrices with one of these in their names are not Muon's.
        muon: How Muon's momentum is stored: ``"gefen"``, in one byte an element, or ``"dense"``.
        backup: ``"gefen"`` or ``"adamw"``.
        betas: Of the backup half.
        eps: Of the backup half.
        backup_factored_v_2d: Whether Gefen keeps second moments of matrices by row and column.
        backup_1d_period_one: Give each element of Gefen's vectors a magnitude of its own.
        backup_2d_period_one: The same for its matrices.
        momentum: Of the Muon half, as the options that follow; see :class:`GefenMuon`.
        nesterov: Whether to use Nesterov momentum.
        ns_steps: Number of Newton-Schulz iterations, where there is no schedule.
        ns_schedule: Coefficients of each Newton-Schulz iteration.
        ns_form: ``"standard"``, or ``"gram"`` for fewer products; see :class:`adapters.Muon`.
        adjust_lr_fn: How the learning rate follows a matrix's shape.
        normuon: Whether to normalise rows.
        normuon_beta2: The share of the old row moment that is kept.
        normuon_eps: Added to the root of the row moment.
        cautious: Whether to leave out elements that point against the gradient.
        sharded_mode: ``"exact"``, ``"distributed"`` or ``"approx"``, of the Muon half; equal on all
            ranks.
        codebook_refresh_every: As in :class:`Gefen`; each half that is quantised learns its own.
        codebook_scope: As in :class:`Gefen`.
        first_gradient: As in :class:`Gefen`.
        control_group: The group to agree in. None derives it from the parameters' meshes.

    Raises:
        TypeError: Something that is no pair of name and parameter.
        ValueError: A parameter is listed twice, or not at all; or an option is out of range.
        NotImplementedError: A placement or a mode is not supported.

    Collectives:
        None at construction. In ``step``, if anything is sharded: one agreement over all ranks
        of both halves, then those of Muon's half, then those of the backup. More when something
        is learned, and in the distributed mode when matrices live on several meshes.

    Source:
        Gefen-X 0.5, whose options and defaults these are.
    """

    _carried = (
        "sharded_mode",
        "codebook_refresh_every",
        "first_gradient",
        "_periods",
        "_muon",
        "_backup",
        "_defaults_of",
        "_reasons",
    )

    def __init__(
        self,
        muon_params: nn.Module | NamedParams,
        backup_params: NamedParams | None = None,
        *,
        lr: float | Tensor = 1e-3,
        muon_lr: float | Tensor | None = None,
        backup_lr: float | Tensor | None = None,
        weight_decay: float = 0.0,
        muon_weight_decay: float | None = None,
        backup_weight_decay: float | None = None,
        no_decay_substrings: Iterable[str] = (),
        backup_substrings: Iterable[str] = DEFAULT_BACKUP_SUBSTRINGS,
        muon: MuonKind = "gefen",
        backup: BackupKind = "gefen",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        backup_factored_v_2d: bool = False,
        backup_1d_period_one: bool = False,
        backup_2d_period_one: bool = False,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_schedule: str | list[tuple[float, float, float]] | None = "tuned3",
        ns_form: Form = "standard",
        adjust_lr_fn: str | None = "match_rms_adamw",
        normuon: bool = True,
        normuon_beta2: float = ROW_BETA,
        normuon_eps: float = ROW_EPS,
        cautious: bool = False,
        sharded_mode: ShardedMode = "exact",
        codebook_refresh_every: int = 0,
        codebook_scope: consensus.Source = "auto",
        first_gradient: FirstGradient = "raise",
        control_group: consensus.Source = None,
    ) -> None:
        self._muon: MuonKind = _choice("muon", muon, get_args(MuonKind))
        self._backup: BackupKind = _choice("backup", backup, get_args(BackupKind))
        self._periods = period_rules(backup_1d_period_one, backup_2d_period_one, ())
        self.sharded_mode = check_sharded_mode(sharded_mode)
        self.codebook_refresh_every = check_refresh(codebook_refresh_every)
        self.codebook_scope = codebook_scope
        self.first_gradient = check_first_gradient(first_gradient)
        self.control_group = control_group
        self._defaults_of: dict[bool, dict[str, Any]] = {
            True: {
                "lr": lr if muon_lr is None else muon_lr,
                "weight_decay": weight_decay if muon_weight_decay is None else muon_weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": DEFAULT_COEFFICIENTS,
                "eps": DEFAULT_EPS,
                "ns_steps": ns_steps,
                "ns_schedule": ns_schedule,
                **({} if ns_form == "standard" else {"ns_form": ns_form}),
                "adjust_lr_fn": adjust_lr_fn,
                "normuon": normuon,
                "normuon_beta2": normuon_beta2,
                "normuon_eps": normuon_eps,
                "cautious": cautious,
            },
            False: {
                "lr": lr if backup_lr is None else backup_lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": (
                    weight_decay if backup_weight_decay is None else backup_weight_decay
                ),
                **({"factored_v_2d": backup_factored_v_2d} if backup == "gefen" else {}),
            },
        }
        self._rules = self._make_rules()
        for use_muon, rule in zip((True, False), self._rules, strict=True):
            half = "the Muon half" if use_muon else "the backup half"
            check_options(self._defaults_of[use_muon], rule.options, f"Hybrid, {half}")
        routes = _routes(muon_params, backup_params, backup_substrings)
        self._reasons = {route.name: route.reason for route in routes}
        if not isinstance(no_decay_substrings, str):  # which is refused below
            no_decay_substrings = tuple(no_decay_substrings)
        super().__init__(_groups(routes, no_decay_substrings), {})

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> Hybrid:
        """Return the optimizer of all trainable parameters of a model.

        Args:
            model: Each of its parameters goes to the half that its module's type, its name and
                its whole shape suggest.
            **options: As for the class.

        Raises:
            ValueError: No parameter is trainable, or all are empty; or an option is out of range.

        Collectives:
            None.
        """
        return cls(model, **options)

    def _make_rules(self) -> tuple[Rule, ...]:
        refresh = self.codebook_refresh_every
        muon: Rule
        if self._muon == "gefen":
            muon = GefenMuonRule(
                self.sharded_mode, refresh_every=refresh, label="Muon half: ", owns=_is_muons
            )
        else:
            muon = MuonRule(
                self.sharded_mode,
                options=MuonVariantOptions,
                label="Muon half: ",
                owns=_is_muons,
            )
        if self._backup == "adamw":
            return muon, AdamWRule(label="backup half: ", owns=_is_backups)
        backup = GefenRule(
            self._periods, refresh_every=refresh, label="backup half: ", owns=_is_backups
        )
        return muon, backup

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the half that its ``use_muon`` names.

        Options that it does not set are those given at construction. A group that is refused is
        not added.

        Raises:
            ValueError: ``use_muon`` is missing, an option is out of range, or a parameter cannot
                be updated by that half.
            NotImplementedError: A placement is not supported.

        Collectives:
            None.
        """
        use_muon = param_group.get("use_muon")
        if not isinstance(use_muon, bool):
            raise ValueError(
                "a parameter group of Hybrid needs use_muon=True (for hidden matrices) or "
                f"use_muon=False (for everything else); got {use_muon!r}"
            )
        super().add_param_group({**self._defaults_of[use_muon], **param_group})

    def __repr__(self) -> str:
        """Return which parameter goes where, and why, and the options of all groups."""
        routes = [
            Route(name, param, group["use_muon"], self._reasons.get(name, "its parameter group"))
            for _, name, param, group in self._members()
        ]
        muon = "GefenMuon" if self._muon == "gefen" else "Muon"
        backup = "Gefen" if self._backup == "gefen" else "AdamW"
        return f"{super().__repr__()}\n{listing(routes, (muon, backup))}"


def _is_muons(group: Mapping[str, Any]) -> bool:
    return bool(group["use_muon"])


def _is_backups(group: Mapping[str, Any]) -> bool:
    return not group["use_muon"]


def _routes(
    muon_params: nn.Module | NamedParams,
    backup_params: NamedParams | None,
    backup_substrings: Iterable[str],
) -> tuple[Route, ...]:
    if backup_params is not None:
        if isinstance(muon_params, nn.Module):
            raise TypeError("give a model, or lists of named parameters; got a model and a list")
        return route_lists(muon_params, backup_params)
    if not isinstance(muon_params, nn.Module):
        return route_named(muon_params, backup_substrings=backup_substrings)
    routes = route_model(muon_params, backup_substrings=backup_substrings)
    check_covers(routes, muon_params)
    return routes


def _groups(routes: Iterable[Route], no_decay_substrings: Iterable[str]) -> list[dict[str, Any]]:
    muon: list[tuple[str, Tensor]] = []
    backup: list[tuple[str, Tensor]] = []
    no_decay: list[tuple[str, Tensor]] = []
    for route in routes:
        if route.use_muon:
            part = muon
        else:
            part = backup if decays(route.name, no_decay_substrings) else no_decay
        part.append((route.name, route.param))
    groups = [
        {"params": muon, "use_muon": True},
        {"params": backup, "use_muon": False},
        {"params": no_decay, "use_muon": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _choice(name: str, value: Any, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, but is: {value!r}")
    return value
