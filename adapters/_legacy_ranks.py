"""State that each rank of gefen-x kept of its own shard, joined to that of whole tensors.

[Note: rank-local files]
    gefen-x lets plain Gefen on sharded parameters, and GefenMuon in its mode "approx", learn a
    codebook and block lengths on each rank from the shard that it holds. Such a file holds the
    state of all ranks, as one run of bytes each, and gefen-x loads it onto the same number of
    ranks only. Here the shards become one tensor: their momenta and second moments are written
    out for each element, joined, and cut into blocks anew. One block length for the whole tensor
    is searched as a job of ours does on its first gradient. A second moment is an average of
    squared gradients, so its root takes the gradient's place: the search squares what it gets.
    GefenMuon has no second moment, so there it is the momentum itself. One codebook is learned
    from the momenta of all parameters, and they are rounded again.

    So such a conversion is not exact. An element of the momentum goes to the nearest of the new
    levels: it moves by at most half the widest gap between two of them, times the largest
    magnitude in its new block. On matrices of up to half a million normal numbers, and on such
    numbers cubed, that was 0.1 to 0.8 % of the momentum's norm, as much as rounding it had cost in
    gefen-x. A second moment keeps its mean over each new block, and every value where a new block
    lies within an old one. A parameter that every rank held whole keeps blocks and second moment.
    The step after that, on a matrix of 301 x 256, was 1.5 to 3 % of its length away from the one
    that gefen-x went on with. Parameters of a few dozen elements can be much farther away, since
    they use few levels, and where the search ends in one block its second moment is one number.
"""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapters._codebook import (
    NUM_BINS,
    divisors,
    histogram,
    is_degenerate,
    learn_levels,
    make_codebook,
    nearest,
)
from adapters._legacy_format import (
    Entry,
    File,
    Id,
    Param,
    Payload,
    Ranks,
    Slot,
    Source,
    in_brief,
    malformed,
    parse,
)
from adapters._period import find_period

_PAYLOAD = "_gefen_rank_local_payload_"  # then the rank


@dataclass(frozen=True, slots=True, eq=False)
class RankSource(Source):
    """What one rank saved."""

    slots: Sequence[Slot] = ()  # what it holds of each parameter, in the order of the file


def read_ranks(file: File, params: Sequence[Param], ranks: Ranks | None) -> list[RankSource]:
    """Return what each rank saved, in the order of ranks; nothing if the file is of whole state.

    Raises:
        ValueError: A rank is missing, or its bytes are damaged, or are of another checkpoint.
    """
    packed: dict[str, object] = {}
    for param in params:  # the first one carries the bytes of all
        entry = file.state.get(param.id, {})
        packed |= {key: entry[key] for key in entry if key.startswith(_PAYLOAD)}
    world_size = 0 if ranks is None else ranks.world_size
    keys = [f"{_PAYLOAD}{rank}" for rank in range(world_size)]
    first = params[0].label if params else "state"
    if packed.keys() != set(keys):
        expected = f"the state of {world_size} ranks, as the metadata of its group says"
        missing = [rank for rank, key in enumerate(keys) if key not in packed][:8]
        raise malformed(first, f"{expected}, got {len(packed)}; missing are the ranks {missing}")
    sources = []
    for rank, key in enumerate(keys):
        label = f"{first}, rank {rank}"
        payload = parse(Payload, _unpack(packed[key], label), label)
        came = (payload.global_rank, payload.world_size, payload.global_step)
        numbers = (rank, world_size, ranks.global_step if ranks is not None else 0)
        if came != numbers:
            raise malformed(label, f"rank, world size and global step {numbers}, got {came}")
        if not len(payload.states) == len(payload.signature) == len(params):
            counts = f"{len(payload.states)} and {len(payload.signature)}"
            raise malformed(label, f"states and signature of {len(params)}, got {counts}")
        states = {param.id: state for param, state in zip(params, payload.states, strict=True)}
        sources.append(RankSource(states, payload.codebook, f", rank {rank}", payload.signature))
    return sources


def _unpack(packed: object, label: str) -> object:
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8 or packed.dim() != 1:
        raise malformed(label, f"one row of uint8, got {in_brief(packed)}")
    data = packed.detach().cpu().contiguous()
    # Not by way of numpy, which is no dependency, nor of a list, which takes a minute for 1 GB.
    buffer = io.BytesIO(ctypes.string_at(data.data_ptr(), data.numel()))
    try:
        return torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch raise almost anything
        raise malformed(label, f"what torch.save wrote, got {type(error).__name__}") from error


def join_ranks(
    params: Sequence[Param], sources: Sequence[RankSource]
) -> tuple[dict[Id, dict[str, Any]], Tensor | None]:
    """Return the state of whole parameters and its codebook; see [Note: rank-local files].

    Needs about 50 bytes for each element of the largest parameter, beside what ranks saved.

    Raises:
        ValueError: What the ranks saved does not fit together.
    """
    shards: dict[Id, _Shards] = {}
    for index, param in enumerate(params):
        if (found := _find_shards(param, index, sources)) is not None:
            shards[param.id] = found
    if not shards:
        return {}, None
    state = {key: found.whole_moments() for key, found in shards.items()}
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device="cpu")
    # Twice the momentum, rather than all momenta at a time: that would be 4 bytes an element.
    for key, found in shards.items():
        rows = found.momentum().view(-1, state[key]["automatic_period"])
        counts += histogram(rows, rows.abs().amax(1, keepdim=True))
    learned = None if is_degenerate(counts) else learn_levels(counts)
    # Without any momentum, all magnitudes are zero and any codebook serves.
    book = make_codebook(next(iter(shards.values())).levels[0] if learned is None else learned)
    for key, found in shards.items():
        momentum = found.momentum()
        rows = momentum.view(-1, state[key]["automatic_period"])
        maxima = rows.abs().amax(1, keepdim=True)
        state[key]["m_codebook"] = nearest(rows / divisors(maxima), book).view(momentum.shape)
        state[key]["m_magnitude"] = maxima.flatten()
    return state, book.levels


@dataclass(frozen=True, slots=True, eq=False)
class _Shards:
    """One parameter, as one or several ranks hold it; none of its shards is empty."""

    dim: int | None  # along which the shards follow each other; None if one holds the whole
    local_shapes: list[list[int]]
    entries: list[Entry]
    levels: list[Tensor]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        shaped = [part.reshape(s) for part, s in zip(parts, self.local_shapes, strict=True)]
        return shaped[0] if self.dim is None else torch.cat(shaped, self.dim)

    def momentum(self) -> Tensor:
        """Return the whole momentum: the parameter's shape, float32, new memory."""
        parts = [
            levels.index_select(0, entry.m_codebook.flatten().int()).view_as(entry.m_codebook)
            * entry.m_magnitude
            for entry, levels in zip(self.entries, self.levels, strict=True)
        ]
        return self._joined(parts)

    def whole_moments(self) -> dict[str, Any]:
        """Return the entry of the whole parameter without its momentum."""
        first = self.entries[0]
        entry = first.moments()
        if self.dim is None:
            return entry | {"automatic_period": first.automatic_period}
        second = self._dense("vmean")
        gradient = self.momentum() if second is None else second.double().sqrt().float()
        # One on all ranks: a scalar, or the job was told to use one. Nothing is lost by keeping it.
        periods = {each.automatic_period for each in self.entries}
        period = 1 if periods == {1} else find_period(gradient)
        entry["automatic_period"] = period
        # Sums of float32 numbers are all but exact in float64, so their order does not matter.
        if second is not None:
            entry["vmean"] = second.view(-1, period).double().mean(1).float()
        if (rows := self._dense("normuon_v")) is not None:
            # A mean over the columns, so that of the whole is the mean over all of them.
            entry["normuon_v"] = rows.double().mean(1, keepdim=True).float()
        return entry

    def _dense(self, key: str) -> Tensor | None:
        """A moment written out for each element; None if there is none."""
        parts = []
        for entry, local in zip(self.entries, self.local_shapes, strict=True):
            if (moment := getattr(entry, key)) is None:
                return None
            # One number a block, or one a row.
            shape = entry.m_codebook.shape if key == "vmean" else local
            parts.append(moment.expand(list(shape)))
        return self._joined(parts)


def _find_shards(param: Param, index: int, sources: Sequence[RankSource]) -> _Shards | None:
    """Return the shards of a parameter in their order; None if it has not been stepped."""
    shape, dim = sources[0].slots[index].shape, sources[0].slots[index].dim
    found: list[tuple[int, Slot, Entry, Tensor]] = []
    without: list[str] = []
    for source in sources:
        slot, label = source.slots[index], param.label + source.place
        if (slot.shape, slot.dim) != (shape, dim):
            raise malformed(label, f"the shape {shape} split by {dim}, got {slot.shape} {slot.dim}")
        numel = math.prod(shape if dim is None else slot.local_shape)
        entry = source.entry(param)
        if entry is None:
            without += [label] if numel else []
            continue
        if entry.m_codebook.numel() != numel:
            raise malformed(label, f"state of {numel} elements, got {entry.m_codebook.numel()}")
        if dim is not None:
            _check_shard(entry, slot, label)
        if source.levels is not None:  # else there would be no entry
            found.append(((slot.coordinate or [0])[0], slot, entry, source.levels))
    if not found:
        return None
    if without:
        raise malformed(without[0], "state, as other ranks have it, got none")
    numbers = {_counters(entry) for _, _, entry, _ in found}
    if len(numbers) != 1:
        got = sorted(map(str, numbers))
        raise malformed(param.label, f"equal steps on all ranks, got {got}")
    if dim is None:
        found = found[:1]  # the others hold the same, apart from rounding to their own levels
    else:
        found.sort(key=lambda each: each[0])
        sizes = [slot.local_shape[dim] for _, slot, _, _ in found]
        split = [len(part) for part in torch.empty(shape[dim], device="cpu").chunk(len(sources))]
        if sizes != split:
            raise malformed(param.label, f"shards of the sizes {split}, got {sizes}")
    return _Shards(
        dim=dim,
        local_shapes=[shape if dim is None else slot.local_shape for _, slot, _, _ in found],
        entries=[entry for _, _, entry, _ in found],
        levels=[levels for _, _, _, levels in found],
    )


def _check_shard(entry: Entry, slot: Slot, label: str) -> None:
    """Raise unless one rank's state of a sharded parameter can be joined to that of others."""
    if entry.v_row is not None:
        raise malformed(label, "vmean alone for a sharded parameter, got v_row and v_col")
    if entry.normuon_v is not None and len(entry.normuon_v) != slot.local_shape[0]:
        raise malformed(label, f"{slot.local_shape[0]} rows, got {len(entry.normuon_v)}")
    by = slot.dim
    if [n for d, n in enumerate(slot.shape) if d != by] != [
        n for d, n in enumerate(slot.local_shape) if d != by
    ]:
        raise malformed(label, f"a shard of {slot.shape}, got {slot.local_shape}")


def _counters(entry: Entry) -> tuple[int | None, ...]:
    return (entry.step, entry.vmean_step, entry.factored_step, entry.normuon_step)
