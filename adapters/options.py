"""What users set, checked once where it enters: at construction and in ``add_param_group``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from adapters._newton_schulz import DEFAULT_EPS, ROW_BETA, ROW_EPS
from adapters._schedules import DEFAULT_COEFFICIENTS, DEFAULT_STEPS, SCHEDULES, Form

ShardedMode = Literal["exact", "distributed", "approx"]


def _list_to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Lr = float | torch.Tensor


def _usable_lr(lr: Lr) -> Lr:
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, but has {lr.shape=}")
    # NaN fails this comparison too; a tensor's NaN passes pydantic's own check.
    if not 0.0 <= lr < float("inf"):
        raise ValueError(f"Learning rate should be >= 0 and finite but is: {lr}")
    return lr


def _not_negative(value: float, info: ValidationInfo) -> float:
    if value < 0.0:
        name = str(info.field_name).replace("_", " ")
        raise ValueError(f"{name} should be >= 0 but is: {value}")
    return value


def _of_three(value: tuple[float, ...]) -> tuple[float, ...]:
    if len(value) != 3:
        raise ValueError(f"Coefficients must be a tuple of exactly 3 values, got {value}")
    return value


# A configuration file has lists only, and a checkpoint may turn a tuple into one.
Floats = Annotated[tuple[float, ...], BeforeValidator(_list_to_tuple)]
Triple = Annotated[Floats, AfterValidator(_of_three)]
NotNegative = Annotated[float, AfterValidator(_not_negative)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]  # of an old average that is kept


class Options(BaseModel):
    """The options of one parameter group."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    lr: Annotated[Lr, AfterValidator(_usable_lr)] = 1e-3


class MuonOptions(Options):
    """The options of Muon; names, order and defaults are torch.optim.Muon's."""

    weight_decay: NotNegative = 0.1
    momentum: NotNegative = 0.95
    nesterov: bool = True
    ns_coefficients: Triple = DEFAULT_COEFFICIENTS
    eps: float = Field(default=DEFAULT_EPS, ge=0.0)
    ns_steps: int = Field(default=DEFAULT_STEPS, ge=0)
    adjust_lr_fn: str | None = None

    @field_validator("ns_steps")
    @classmethod
    def _check_steps(cls, value: int) -> int:
        if value >= 100:
            raise ValueError(
                "Number of steps must be less than 100 for computational efficiency, "
                f"but is: {value}"
            )
        return value

    @field_validator("adjust_lr_fn")
    @classmethod
    def _check_adjust_lr_fn(cls, value: str | None) -> str | None:
        if value not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"Adjust learning rate function {value} is not supported; "
                'give "original", "match_rms_adamw" or None'
            )
        return value


class MuonVariantOptions(MuonOptions):
    """What Gefen-X adds to Muon's options; its names and defaults."""

    ns_schedule: str | Annotated[tuple[Triple, ...], BeforeValidator(_list_to_tuple)] | None = None
    ns_form: Form = "standard"
    normuon: bool = False
    normuon_beta2: Share = ROW_BETA
    normuon_eps: float = Field(default=ROW_EPS, gt=0.0)
    cautious: bool = False
    capturable: bool = False

    @field_validator("ns_schedule")
    @classmethod
    def _check_schedule(cls, value: Any) -> Any:
        known = ("standard", *SCHEDULES)
        if value == () or (isinstance(value, str) and value not in known):
            raise ValueError(
                f"expected one of {known}, a list of coefficient triples or None; got {value!r}"
            )
        return value


class GefenOptions(Options):
    """The options of Gefen; names and defaults are Gefen-X's, ``betas`` as everywhere in torch."""

    betas: Annotated[tuple[Share, Share], BeforeValidator(_list_to_tuple)] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: NotNegative = 0.0
    factored_v_2d: bool = True


class AdamWOptions(Options):
    """The options of AdamW; names and defaults are torch.optim.AdamW's."""

    betas: Annotated[tuple[Share, Share], BeforeValidator(_list_to_tuple)] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 1e-2
    # Loaded with the groups of torch's own; only these are supported.
    amsgrad: Literal[False] = False
    maximize: Literal[False] = False


def check_options(group: Mapping[str, Any], options: type[BaseModel], where: str) -> None:
    """Raise if the options in ``group`` cannot be used.

    A group may carry keys of its own, as in torch (schedulers put ``initial_lr`` there), so only
    a key that looks like a misspelt option is refused.

    Args:
        group: A parameter group, or the keyword arguments of an optimizer.
        options: What they may be.
        where: What the text calls the place of the options, such as "parameter group 1".

    Raises:
        ValueError: An option is misspelt, of the wrong type, or out of its range.
    """
    names = list(options.model_fields)
    given = {
        key: value
        for key, value in group.items()
        if key in names or difflib.get_close_matches(key, names, n=1, cutoff=0.85)
    }
    try:
        options(**given)
    except ValidationError as error:
        raise ValueError(f"{where}: {_in_words(error, names)}") from None


def _in_words(error: ValidationError, names: list[str]) -> str:
    """One line for all that pydantic found, with what to write instead of a misspelt name."""
    texts: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        name = str(item["loc"][0])
        if item["type"] == "extra_forbidden":
            meant = difflib.get_close_matches(name, names, n=1)[0]
            text = f"no option has this name; did you mean {meant}?"
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"])
        else:
            text = f"{item['msg']}, got {item['input']!r}"
        texts.setdefault(name, []).append(text)
    return "; ".join(f"{name}: {' or '.join(found)}" for name, found in texts.items())


def check_sharded_mode(mode: str) -> ShardedMode:
    """Return ``mode`` if there is one of this name.

    Raises:
        ValueError: There is none.
    """
    for known in get_args(ShardedMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"sharded_mode must be one of {get_args(ShardedMode)}, but is: {mode!r}")
