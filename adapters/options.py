"""What users set, checked once where it enters: at construction and in ``add_param_group``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from adapters._newton_schulz import DEFAULT_COEFFICIENTS, DEFAULT_EPS, DEFAULT_STEPS

ShardedMode = Literal["exact", "approx"]


def _list_to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class MuonOptions(BaseModel):
    """The options of one parameter group; names, order and defaults are torch.optim.Muon's."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    lr: float | torch.Tensor = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    # A configuration file has lists only, and a checkpoint may turn a tuple into one.
    ns_coefficients: Annotated[tuple[float, ...], BeforeValidator(_list_to_tuple)] = (
        DEFAULT_COEFFICIENTS
    )
    eps: float = Field(default=DEFAULT_EPS, ge=0.0)
    ns_steps: int = Field(default=DEFAULT_STEPS, ge=0)
    adjust_lr_fn: str | None = None

    @field_validator("lr")
    @classmethod
    def _check_lr(cls, lr: float | torch.Tensor) -> float | torch.Tensor:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, but has {lr.shape=}")
        # NaN fails this comparison too; a tensor's NaN passes pydantic's own check.
        if not 0.0 <= lr < float("inf"):
            raise ValueError(f"Learning rate should be >= 0 and finite but is: {lr}")
        return lr

    @field_validator("momentum", "weight_decay")
    @classmethod
    def _check_not_negative(cls, value: float, info: Any) -> float:
        if value < 0.0:
            name = str(info.field_name).replace("_", " ")
            raise ValueError(f"{name} should be >= 0 but is: {value}")
        return value

    @field_validator("ns_coefficients")
    @classmethod
    def _check_coefficients(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(value) != 3:
            raise ValueError(f"Coefficients must be a tuple of exactly 3 values, got {value}")
        return value

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
    """Return ``mode`` if this version has it.

    Raises:
        NotImplementedError: ``"distributed"``, where an owner computes for all, is not built yet.
        ValueError: No mode has this name.
    """
    if mode == "distributed":
        raise NotImplementedError(
            'sharded_mode="distributed" is not supported yet. Use "exact" (the same bits as one '
            'device) or "approx" (each shard on its own, without communication).'
        )
    for known in get_args(ShardedMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f'sharded_mode must be "exact" or "approx", but is: {mode!r}')
