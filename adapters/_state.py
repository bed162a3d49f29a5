"""What a checkpoint of quantised momenta holds: its schema, and how much of it each rank has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from adapters._blocks import Part, blocks_here
from adapters._codebook import check_levels
from adapters._shards import Shards

FORMAT = 1
RECORD = "gefen"  # its key in a parameter group


_Model = TypeVar("_Model", bound=BaseModel)


class _Schema(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True
    )


class Record(_Schema):
    """What belongs to all parameters of one rule."""

    format: Literal[1]
    codebook: Tensor | None
    global_step: int = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> Record:
        if self.codebook is not None:
            try:
                check_levels(self.codebook)
            except TypeError as error:  # pydantic lets it through
                raise ValueError(f"codebook: {error}") from None
        return self


class Entry(_Schema):
    """What belongs to one parameter with a quantised momentum."""

    automatic_period: int = Field(ge=1)
    step: int | None = Field(default=None, ge=0)
    m_codebook: Tensor | None = None
    m_magnitude: Tensor | None = None
    vmean: Tensor | None = None
    vmean_step: int | None = Field(default=None, ge=0)
    v_row: Tensor | None = None
    v_col: Tensor | None = None
    factored_step: int | None = Field(default=None, ge=0)
    normuon_v: Tensor | None = None
    normuon_rows: Tensor | None = None  # the same, of this rank's rows
    normuon_step: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_pairs(self) -> Entry:
        if (self.m_codebook is None) != (self.m_magnitude is None):
            raise ValueError("m_codebook and m_magnitude belong together; one is missing")
        if (self.v_row is None) != (self.v_col is None):
            raise ValueError("v_row and v_col belong together; one is missing")
        if self.m_codebook is not None and self.step is None:
            raise ValueError("step, which counts the steps of m_codebook, is missing")
        for moment, counter in _COUNTED.items():
            if getattr(self, moment) is not None and self.m_codebook is None:
                raise ValueError(f"{moment} belongs to m_codebook, which is missing")
            of = [key for key, its in _COUNTED.items() if its == counter]
            if getattr(self, counter) is not None and all(getattr(self, key) is None for key in of):
                raise ValueError(f"{counter} counts the steps of {moment}, which is missing")
        rows = [key for key in ("normuon_v", "normuon_rows") if getattr(self, key) is not None]
        if rows and self.normuon_step is None:
            raise ValueError(f"normuon_step, which counts the steps of {rows[0]}, is missing")
        return self


# A second moment without its counter is as old as the momentum: early versions had none.
_COUNTED = {
    "vmean": "vmean_step",
    "v_row": "factored_step",
    "normuon_rows": "normuon_step",
    "normuon_v": "normuon_step",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One tensor of a parameter's state: how much of it each part of the parameter has."""

    whole: tuple[int, ...]  # its shape in the state of the whole parameter
    lengths: Callable[[], Sequence[int]]  # of each part
    take: Callable[[Tensor], Tensor]  # this rank's part of the whole, given flat
    shape: tuple[int, ...]  # of this rank's part

    def is_whole(self, value: Tensor) -> bool:
        """Whether a tensor is the whole; indices may be flat, as gefen-x has them."""
        return tuple(value.shape) in (self.whole, (math.prod(self.whole),))


@lru_cache(maxsize=4096)
def _num_blocks(parts: tuple[Part, ...], period: int) -> tuple[int, ...]:
    return tuple(len(blocks_here(part, period)) for part in parts)


def kinds_of(shards: Shards, period: int) -> dict[str, Kind]:
    """Return what the state of a parameter may hold."""
    own = shards.own

    def indices(whole: Tensor) -> Tensor:
        found = whole.view(shards.shape)
        for dim, (start, length) in enumerate(shards.box):
            found = found.narrow(dim, start, length)
        return found.flatten()

    def of_blocks(whole: Tensor) -> Tensor:
        return whole[blocks_here(own, period).to(whole.device)]

    def num_blocks() -> Sequence[int]:
        return _num_blocks(shards.parts, period)

    numels = [part.numel for part in shards.parts]
    box = tuple(length for _, length in shards.box)
    num_whole = sum(numels) // period
    blocks = Kind((num_whole,), num_blocks, of_blocks, (len(blocks_here(own, period)),))
    kinds = {
        "m_codebook": Kind(shards.shape, lambda: numels, indices, box),
        "m_magnitude": blocks,
        "vmean": blocks,
    }
    if len(shards.shape) != 2:
        return kinds
    rows, cols = shards.shape
    first, num_rows = shards.box[0]

    def rows_here(whole: Tensor) -> Tensor:
        return whole[first : first + num_rows]

    def num_rows_each() -> list[int]:
        parts = shards.parts
        return [part.num_runs if part.distance else part.numel // cols for part in parts]

    def all_of(shape: tuple[int, ...]) -> Kind:
        return Kind(shape, lambda: [shape[0]], lambda whole: whole, shape)

    kinds["v_row"] = Kind((rows,), num_rows_each, rows_here, (num_rows,))
    kinds["normuon_rows"] = Kind((rows, 1), num_rows_each, rows_here, (num_rows, 1))
    kinds["v_col"] = all_of((cols,))
    kinds["normuon_v"] = all_of((rows, 1))
    return kinds


_REASONS = {"missing": "missing", "extra_forbidden": "not known to this version"}


def parse(schema: type[_Model], value: Any, where: str) -> _Model:
    """Return what ``value`` holds.

    Raises:
        ValueError: It is not as the schema says; ``where`` begins the text.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        texts = []
        for item in error.errors(include_url=False):
            name = ".".join(map(str, item["loc"]))
            if item["type"] in _REASONS:
                reason = _REASONS[item["type"]]
            else:
                reason = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
            texts.append(f"{name}: {reason}" if name else reason)
        raise ValueError(f"{where}: {'; '.join(texts)}") from None
