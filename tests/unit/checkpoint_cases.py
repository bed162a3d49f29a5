"""State dicts that are damaged in one place, and what to say of each. Plain or sharded alike."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters import Gefen

Edit = Callable[[Any], None]
GONE = object()
BOOK = ("param_groups", 0, "gefen")


@dataclass(frozen=True)
class Damage:
    """What to do to a state dict of Gefen's, and what the error says."""

    name: str
    edit: Edit = field(hash=False)
    text: str
    sharded: str = ""  # what it says of shards, if that is something else


def put(*path: Any, to: Any) -> Edit:
    """Set what lies at a path; GONE removes it, and a function makes it of what was there."""

    def edit(value: Any) -> None:
        *parents, last = path
        for key in parents:
            value = value[key]
        if to is GONE:
            del value[last]
        else:
            value[last] = to(value[last]) if callable(to) else to

    return edit


def first(value: float) -> Callable[[Tensor], Tensor]:
    """Put a value at the first element, of what this rank holds."""

    def edit(tensor: Tensor) -> Tensor:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        part.view(-1)[0] = value
        return tensor

    return edit


def state(key: str, to: Any, position: int = 0) -> Edit:
    return put("state", position, key, to=to)


def all_of(*edits: Edit) -> Edit:
    def edit(value: Any) -> None:
        for each in edits:
            each(value)

    return edit


def from_another(key: str, *, of: int, put_as: str | None = None) -> Edit:
    """Give the first parameter what belongs to another one, or to another name."""

    def edit(value: Any) -> None:
        value["state"][0][put_as or key] = value["state"][of][key]

    return edit


def descending(levels: Tensor) -> Tensor:
    return levels.flip(0)


# The first parameter is a matrix with a factored moment, the third has three dims.
DAMAGES = (
    Damage("no codebook", put(*BOOK, "codebook", to=GONE), "0, gefen: codebook: missing"),
    Damage("codebook None", put(*BOOK, "codebook", to=None), "layer.0 has indices, but there is"),
    Damage("no record", put(*BOOK, to=GONE), "parameter group 0 has no record of a codebook"),
    Damage("a record that is none", put(*BOOK, to=3), "parameter group 0, gefen: "),
    Damage("later format", put(*BOOK, "format", to=2), "0 has format 2; this version reads form"),
    Damage("levels descend", put(*BOOK, "codebook", to=descending), "levels of a codebook ascend"),
    Damage("levels too many", put(*BOOK, "codebook", to=torch.zeros(257)), "codebook has shape"),
    Damage("double levels", put(*BOOK, "codebook", to=lambda x: x.double()), "is torch.float32; g"),
    Damage("more in the record", put(*BOOK, "seed", to=1), "0, gefen: seed: not known to this ver"),
    Damage("step below 0", put(*BOOK, "global_step", to=-1), "0, gefen: global_step: Input should"),
    Damage(
        "wide indices", state("m_codebook", lambda x: x.int()), "m_codebook is torch.int32; exp"
    ),
    Damage("another's indices", from_another("m_codebook", of=1), "m_codebook has shape (5, 6)"),
    Damage("no indices", state("m_codebook", GONE), "m_codebook and m_magnitude belong together"),
    Damage("no magnitudes", state("m_magnitude", GONE), "m_codebook and m_magnitude belong togeth"),
    Damage("magnitude below 0", state("m_magnitude", first(-1.0)), "m_magnitude holds values that"),
    Damage(
        "short magnitudes", state("m_magnitude", lambda x: x.half()), "m_magnitude is torch.flo"
    ),
    Damage("moment NaN", state("v_row", first(float("nan"))), "v_row holds values that are neg"),
    Damage(
        "moment infinite", state("vmean", first(float("inf")), 2), "layer.2, vmean holds values"
    ),
    Damage(
        "moment too long", from_another("v_col", of=0, put_as="v_row"), "layer.0, v_row has sha"
    ),
    Damage("moment too short", from_another("v_row", of=0, put_as="v_col"), "layer.0, v_col has s"),
    Damage("half a moment", state("v_col", GONE), "v_row and v_col belong together; one is miss"),
    Damage(
        "counter alone",
        all_of(state("v_row", GONE), state("v_col", GONE)),
        "layer.0: factored_step counts the steps of v_row, which is missing",
    ),
    Damage("block counter alone", state("vmean", GONE, 2), "layer.2: vmean_step counts the steps"),
    Damage(
        "moment alone",
        all_of(state("m_codebook", GONE), state("m_magnitude", GONE)),
        "layer.0: v_row belongs to m_codebook, which is missing",
    ),
    Damage("no step", state("step", GONE), "layer.0: step, which counts the steps of m_codebook"),
    Damage("step below 0", state("step", -1), "layer.0: step: Input should be greater than or"),
    Damage("step no number", state("step", 1.5), "layer.0: step: Input should be a valid integer"),
    Damage("no period", state("automatic_period", GONE), "layer.0: automatic_period: missing"),
    Damage("period 0", state("automatic_period", 0), "layer.0: automatic_period: Input should be"),
    Damage(
        "period 5",
        state("automatic_period", 5),
        "blocks of 5 elements do not divide a parameter of 96",
        "layer.0 was made with another codebook or other blocks than those beside it",
    ),
    Damage("more in the state", state("exp_avg", 1), "layer.0: exp_avg: not known to this version"),
    Damage("state is a list", put("state", 0, to=[1]), "the state of layer.0 is a list; expected"),
    Damage(
        "state of no one",
        lambda value: value["state"].update({99: {}}),
        "the state dict has state of [99], which none of its groups lists",
    ),
    Damage(
        "state of Muon's",
        all_of(from_another("v_row", of=0, put_as="normuon_v"), state("normuon_step", 1)),
        "layer.0 has ['normuon_v']; another optimizer has saved it",
    ),
    Damage("no groups", put("param_groups", to=GONE), 'the state dict has no "param_groups"; exp'),
    Damage("no states", put("state", to=GONE), 'the state dict has no "state"; expected what stat'),
    Damage("no parameters", put("param_groups", 0, "params", to=GONE), 'group 0 has no "params"'),
    Damage(
        "one more group",
        lambda value: value["param_groups"].append({**value["param_groups"][0], "params": []}),
        "the optimizer has groups of [5] parameters, the state dict of [5, 0]",
    ),
    Damage(
        "a parameter twice",
        put("param_groups", 0, "params", 1, to=0),
        "the state dict lists a parameter twice",
    ),
    Damage(
        "another name",
        put("param_groups", 0, "param_names", 1, to="layer.7"),
        "parameter group 0 has layer.1 where the state dict has layer.7; list parameters in",
    ),
    Damage(
        "a name less",
        put("param_groups", 0, "param_names", 1, to=GONE),
        "parameter group 0 of the state dict has 4 names for 5 parameters",
    ),
    Damage("lr below 0", put("param_groups", 0, "lr", to=-1.0), "parameter group 0: lr: Learning"),
    Damage(
        "beta 1", put("param_groups", 0, "betas", to=(0.9, 1.0)), "group 0: betas: Input should"
    ),
)


def from_file(value: Any) -> Any:
    """What a file holds of a state dict."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def damaged(optimizer: Gefen, damage: Damage) -> Any:
    """The optimizer's own state dict, damaged; it shares no memory with the optimizer."""
    given = copy.deepcopy(optimizer.state_dict())
    damage.edit(given)
    return given
