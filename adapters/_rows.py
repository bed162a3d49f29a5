"""One rank's part of a parameter's state as DTensors, so that no tool takes it for another's.

Nothing here communicates.

[Note: rows]
    What lies as its parameter does (indices, dense momenta) is a DTensor with its placements. All
    else has lengths of its own. So it is one row for each part of the parameter, as long as the
    longest; ranks that hold copies of a part have the same row.

[Note: origin]
    A DTensor says how it is cut, but not which of its parts a file holds: what rank 0 saved looks
    like its own to rank 1. And what is no tensor, such as a block length, or belongs to each rank
    alone, such as a codebook in the mode "approx", is taken from one rank by tools that write one
    file for all. So one more row says what the others go with: whether the part was a tensor of its
    own, the length of its blocks, the codebook, and which elements they are of. The number of the
    part would not do: FSDP on 4 ranks and FSDP over TP on 2 x 2 both cut rows in 4, and number them
    in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from adapters._rules import local
from adapters._shards import read_shards

ORIGIN = "origin"  # its key in a packed entry
_NO_BOX = 2**32  # subtracted from what is no element's place


def is_cut(param: Tensor) -> bool:
    """Whether ranks hold different parts of a parameter; the same on all of them."""
    return isinstance(param, DTensor) and any(
        not placement.is_replicate() and param.device_mesh.size(axis) > 1
        for axis, placement in enumerate(param.placements)
    )


def as_param(value: Tensor, param: DTensor) -> DTensor:
    """Return this rank's part of something that lies as its parameter does."""
    return DTensor.from_local(
        value,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def as_row(value: Tensor, param: DTensor, width: int) -> DTensor:
    """Return this rank's part of something else: shape (parts, width), zeros behind it."""
    row = value.new_zeros(1, max(width, value.numel()))
    row[0, : value.numel()] = value.flatten()
    placements = [Replicate() if p.is_replicate() else Shard(0) for p in param.placements]
    shape = torch.Size((_num_parts(param), row.size(1)))
    return DTensor.from_local(
        row, param.device_mesh, placements, run_check=False, shape=shape, stride=(row.size(1), 1)
    )


def own_row(value: DTensor, numel: int, width: int, param: Tensor, where: str) -> Tensor:
    """Return the first elements of this rank's row, which was packed with this width.

    Raises:
        ValueError: It is not on the mesh of the parameter, or cut in another way.
    """
    check_mesh(value, param, where)
    row = value.to_local()
    if row.shape != (1, max(width, numel)):
        raise ValueError(
            f"{where} has shape {tuple(row.shape)} on this rank; expected "
            f"{(1, max(width, numel))}. {_ADVICE}"
        )
    return row[0, :numel]


def own_part(value: DTensor, param: Tensor, where: str) -> Tensor:
    """Return this rank's part of something that lies as its parameter does.

    Raises:
        ValueError: It lies in another way.
    """
    check_mesh(value, param, where)
    if not isinstance(param, DTensor):
        raise AssertionError("such a parameter is on no mesh")
    # On an axis of one rank every placement means the same.
    pairs = enumerate(zip(value.placements, param.placements, strict=True))
    same = all(mine == its or param.device_mesh.size(axis) == 1 for axis, (mine, its) in pairs)
    if not same or value.shape != param.shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)} and is placed as {value.placements}; the "
            f"parameter has shape {tuple(param.shape)} and is placed as {param.placements}. "
            f"{_ADVICE}"
        )
    return value.to_local()


def check_mesh(value: DTensor, param: Tensor, where: str) -> None:
    """Raise ValueError unless both are on the same mesh."""
    if not isinstance(param, DTensor):
        raise ValueError(
            f"{where} is this rank's part of a sharded tensor, the parameter is not sharded. "
            f"{_ADVICE}"
        )
    if value.device_mesh != param.device_mesh:
        raise ValueError(
            f"{where} was saved on {value.device_mesh}, the parameter is on {param.device_mesh}. "
            f"{_ADVICE}"
        )


_ADVICE = (
    "State of shards is loaded with the mesh and the placements it was saved with. A state dict "
    "of whole tensors, from an unsharded run, is loaded with any."
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What one rank's rows go with; see [Note: origin]."""

    place: tuple[int, ...]  # of the elements, see _place_of
    alone: bool
    period: int = 0
    codebook: int = 0  # a digest

    def packed(self, param: DTensor) -> DTensor:
        """Return it as a row."""
        values = [int(self.alone), self.period, self.codebook, *self.place]
        return as_row(torch.tensor(values, device=local(param).device), param, len(values))

    @classmethod
    def of(cls, param: Tensor, *, alone: bool, period: int = 0, digest: str = "") -> Origin:
        """Return what rows of a parameter should have.

        Args:
            param: The parameter, on this rank.
            alone: Whether this rank's part is a tensor of its own.
            period: Elements of a block.
            digest: Of the codebook, hexadecimal, 8 bytes.
        """
        codebook = int(digest, 16) - 2**63 if digest else 0
        return cls(_place_of(param), alone and is_cut(param), period, codebook)

    def check(self, saved: object, param: Tensor, where: str) -> None:
        """Raise ValueError unless rows that were saved with another origin are this one's."""
        if not isinstance(saved, DTensor):
            raise ValueError(
                f"{where} is that of shards, but does not say of which; a tool has removed its "
                f'"{ORIGIN}". Save what state_dict() returns as it is.'
            )
        width = 3 + len(self.place)
        row = own_row(saved, width, width, param, f"{where}, {ORIGIN}")
        alone, period, codebook, *place = row.tolist()
        if tuple(place) != self.place:
            raise ValueError(
                f"{where} is that of {_text(place)}, but this rank holds {_text(self.place)}; each "
                f"rank loads what it saved itself. {_ADVICE}"
            )
        if alone != int(self.alone):
            modes = ('"exact"', '"approx"')
            raise ValueError(
                f"{where} was saved with sharded_mode {modes[bool(alone)]}, this optimizer has "
                f"{modes[self.alone]}; shards of one cannot be read as those of the other"
            )
        if (period, codebook) != (self.period, self.codebook):
            raise ValueError(
                f"{where} was made with another codebook or other blocks than those beside it; a "
                "tool has written one rank's for all. Let each rank save its own file."
            )


def _place_of(param: Tensor) -> tuple[int, ...]:
    """Return start and length of what this rank holds, in each dimension.

    In the mode "approx" a part may have any form. Of one that is no box it is the place on the axes
    of the mesh that cut it, less 2 ** 32, which no element has.
    """
    try:
        box = read_shards(param, name="a parameter").box
    except NotImplementedError:
        assert isinstance(param, DTensor)
        mesh, cuts = param.device_mesh, enumerate(param.placements)
        axes = [axis for axis, placement in cuts if not placement.is_replicate()]
        return tuple(mesh.get_local_rank(axis) - _NO_BOX for axis in axes)
    return tuple(number for span in box for number in span)


def _text(place: Sequence[int]) -> str:
    if place[0] < 0:
        return f"place {[number + _NO_BOX for number in place]} on the mesh"
    spans = zip(place[::2], place[1::2], strict=True)
    return f"elements [{', '.join(f'{start}:{start + length}' for start, length in spans)}]"


def _num_parts(param: DTensor) -> int:
    found = 1
    for axis, placement in enumerate(param.placements):
        found *= 1 if placement.is_replicate() else param.device_mesh.size(axis)
    return found


def cut(whole: Tensor, param: DTensor, name: str) -> DTensor:
    """Return this rank's part of a whole tensor of the parameter's shape, in memory of its own."""
    found = whole
    for dim, (start, length) in enumerate(read_shards(param, name=name).box):
        found = found.narrow(dim, start, length)
    return as_param(found.to(local(param).device, copy=True).contiguous(), param)
