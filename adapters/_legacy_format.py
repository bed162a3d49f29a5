"""What a checkpoint of gefen-x 0.5 may look like, checked field by field as it is read.

Only what decides whether its numbers can be used is checked here. What concerns several fields of
different objects is checked where they are brought together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from torch import Tensor

from adapters._codebook import check_levels

Id: TypeAlias = int | str  # of a parameter; a string where torch's DCP put its name
_ADVICE = "Save it again with gefen-x 0.5 from the job that it is of, or load an older checkpoint."
_Model = TypeVar("_Model", bound=BaseModel)


def malformed(where: str, problem: str) -> ValueError:
    """``problem`` says what was expected and what came."""
    return ValueError(f"gefen-x checkpoint, {where}: expected {problem}. {_ADVICE}")


def in_brief(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:80]


def parse(model: type[_Model], raw: object, where: str) -> _Model:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            place = ".".join(map(str, item["loc"]))
            if item["type"] == "value_error":
                text = str(item["ctx"]["error"])
            elif item["type"] in ("missing", "extra_forbidden"):
                text = "missing" if item["type"] == "missing" else "not known to gefen-x 0.5"
            else:
                text = f"{item['msg']}, got {in_brief(item['input'])}"
            problems.append(f"{place}: {text}" if place else text)
        listed = "; ".join(dict.fromkeys(problems))
        raise ValueError(f"gefen-x checkpoint, {where}: {listed}. {_ADVICE}") from None


def _to_int(value: object) -> object:
    # Under capturable=True a counter is a float tensor.
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        number = float(value)
        return int(number) if number.is_integer() else number
    return value


def _checked_levels(levels: Tensor | None) -> Tensor | None:
    if levels is not None:
        try:
            check_levels(levels)
        except TypeError as error:
            raise ValueError(str(error)) from None
    return levels


_Count: TypeAlias = Annotated[int, BeforeValidator(_to_int), Field(ge=0)]
_Step: TypeAlias = Annotated[int, BeforeValidator(_to_int), Field(ge=1)]
_Levels: TypeAlias = Annotated[Tensor | None, AfterValidator(_checked_levels)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True)


class Entry(Strict):
    """The state of one parameter that has been stepped, or of one rank's shard of it."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    automatic_period: Annotated[int, Field(ge=1)]
    step: _Step
    m_codebook: Tensor  # (blocks, period)
    m_magnitude: Tensor  # (blocks, 1)
    vmean: Tensor | None = None  # (blocks, 1)
    vmean_step: _Step | None = None
    v_row: Tensor | None = None
    v_col: Tensor | None = None
    factored_step: _Step | None = None
    normuon_v: Tensor | None = None  # (rows, 1)
    normuon_step: _Step | None = None

    @model_validator(mode="after")
    def _check(self) -> Entry:
        indices, numel = self.m_codebook, self.m_codebook.numel()
        blocks = numel // self.automatic_period
        shape = (blocks, self.automatic_period)
        if indices.dtype != torch.uint8 or not numel or tuple(indices.shape) != shape:
            got = in_brief(indices)
            raise ValueError(f"m_codebook: expected uint8 (n, {self.automatic_period}), got {got}")
        _check_moment("m_magnitude", self.m_magnitude, (blocks, 1))
        _check_moment("vmean", self.vmean, (blocks, 1))
        _check_moment("v_row", self.v_row, (None,))
        _check_moment("v_col", self.v_col, (None,))
        _check_moment("normuon_v", self.normuon_v, (None, 1))
        if (self.v_row is None) != (self.v_col is None):
            raise ValueError("expected v_row and v_col, got one of them")
        if (self.normuon_v is None) != (self.normuon_step is None):
            raise ValueError("expected normuon_v and normuon_step, got one of them")
        for moment, key in (("vmean", "vmean_step"), ("v_row", "factored_step")):
            if getattr(self, moment) is None and getattr(self, key) is not None:
                raise ValueError(f"expected {moment} beside {key}, got the counter alone")
        if self.v_row is not None and self.v_col is not None:
            rows, cols = len(self.v_row), len(self.v_col)
            if rows * cols != numel:
                raise ValueError(f"expected v_row * v_col of {numel}, got {rows} * {cols}")
        if self.normuon_v is not None and (not len(self.normuon_v) or numel % len(self.normuon_v)):
            raise ValueError(f"normuon_v: {len(self.normuon_v)} rows do not divide {numel}")
        return self

    def moments(self) -> dict[str, Any]:
        """Return copies of all but the momentum and its period, under our names."""
        found: dict[str, Any] = {"step": self.step}
        for key in ("vmean", "v_row", "v_col"):
            if (tensor := getattr(self, key)) is not None:
                found[key] = tensor.detach().flatten().clone()
        if self.normuon_v is not None:
            found["normuon_v"] = self.normuon_v.detach().clone()
        for key in ("vmean_step", "factored_step", "normuon_step"):
            if (count := getattr(self, key)) is not None:
                found[key] = count
        return found


def _check_moment(key: str, tensor: Tensor | None, shape: tuple[int | None, ...]) -> None:
    """Raise unless it is absent, or float32, of this shape (None: any), finite and not negative."""
    if tensor is None:
        return
    fits = tensor.dim() == len(shape) and all(
        size is None or size == got for size, got in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != torch.float32 or not fits:
        text = ", ".join("n" if size is None else str(size) for size in shape)
        raise ValueError(f"{key}: expected float32 ({text}), got {in_brief(tensor)}")
    if not bool(((tensor >= 0) & tensor.isfinite()).all()):
        raise ValueError(f"{key}: expected finite values from 0 on, got others")


class AdamWEntry(Strict):
    model_config = ConfigDict(extra="forbid")

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None


class Placement(Strict):
    """How a tensor lies on a mesh axis; a strided shard has another type and is refused."""

    type: Literal["Shard", "Replicate"]
    dim: Annotated[int, Field(ge=0)] | None = None


class Slot(Strict):
    """What one rank holds of one parameter."""

    name: str
    sharded: bool
    shape: list[int]
    local_shape: list[int]
    sharded_mode: str | None = None  # None for Gefen
    placements: list[Placement] = []
    coordinate: list[int] | None = None

    @property
    def dim(self) -> int | None:
        """Along which the state is split; None if this rank holds the state of the whole."""
        whole = self.sharded_mode in ("exact", "distributed")
        return None if whole or not self.placements else self.placements[0].dim

    @model_validator(mode="after")
    def _check(self) -> Slot:
        if not self.sharded:
            return self
        if len(self.placements) != 1 or self.coordinate is None or len(self.coordinate) != 1:
            raise ValueError("expected a mesh of one axis, got another")
        dim = self.placements[0].dim
        if dim is None and self.placements[0].type == "Shard":
            raise ValueError("expected the dimension of a Shard, got none")
        if dim is not None and not dim < len(self.shape) == len(self.local_shape):
            raise ValueError(f"expected a shard of {self.shape}, got {self.local_shape} by {dim}")
        return self


class Payload(Strict):
    """What one rank saved."""

    format: Literal["rank_local_dtensor_v2"]
    global_rank: int
    world_size: int
    global_step: _Count
    signature: list[Slot]
    states: list[dict[str, Any]]
    codebook: _Levels


class Ranks(Strict):
    format: Literal["rank_local_dtensor_v2"]
    world_size: Annotated[int, Field(ge=1)]
    global_step: _Count


class Owned(Strict):
    saved_id: Id
    shape: tuple[int, ...] | list[int]
    owner: int
    state_keys: tuple[str, ...] | list[str]
    initialized: bool


class Owners(Strict):
    world_size: Annotated[int, Field(ge=1)]
    params: list[Owned]


class Manifest(Strict):
    """Proof that the state of a distributed GefenMuon was gathered from its owners."""

    version: Literal[1, 2]
    ownership: Literal["stable_full_param_index_v1"]
    consolidated: Literal[True]
    groups: list[Owners] = []


class Metadata(Strict):
    format_version: Literal[1, 2, 3]
    global_step: _Count
    codebook: _Levels = None
    rank_local_sharded_state: Ranks | None = None
    muon_distributed_state: Manifest | None = None


class Group(Strict):
    model_config = ConfigDict(extra="allow")

    params: list[Id]
    param_names: list[str] | None = None
    param_names_synthesized: list[bool] | None = None
    beta1: float | None = None
    beta2: float | None = None
    metadata: Metadata | None = Field(None, alias="_gefen_checkpoint_metadata")


class File(Strict):
    state: dict[Id, dict[str, Any]]
    param_groups: list[Group]
    gefen_global_step: _Count | None = None
    gefen_codebook: _Levels = None
    gefen_muon_distributed: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter as the file lists it."""

    id: Id
    name: str | None
    label: str  # for errors
    is_muon: bool


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where states are read from: the file itself, or what one rank saved in it."""

    states: Mapping[Id, Mapping[str, Any]]
    levels: Tensor | None
    place: str = ""  # added to a parameter's label

    def entry(self, param: Param) -> Entry | None:
        """Return the state of a parameter; None before its first step."""
        raw = self.states.get(param.id, {})
        if set(raw) <= {"name"}:
            return None
        label = param.label + self.place
        entry = parse(Entry, raw, label)
        if None not in (entry.name, param.name) and entry.name != param.name:
            raise malformed(label, f"the state of {param.name!r}, got that of {entry.name!r}")
        if self.levels is None:
            raise malformed(label, "a codebook beside its m_codebook, got none")
        if not param.is_muon and entry.vmean is None and entry.v_row is None:
            raise malformed(label, "a second moment (vmean, or v_row and v_col), got none")
        if not param.is_muon and entry.normuon_v is not None:
            raise malformed(label, "no normuon_v outside a GefenMuon, got one")
        if param.is_muon and (entry.vmean is not None or entry.v_row is not None):
            raise malformed(label, "no vmean, v_row or v_col in a GefenMuon, got some")
        return entry
