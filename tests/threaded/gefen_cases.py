"""What optimizers with codebooks are tried on: layouts, and models in two copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from adapters import Gefen, GefenMuon, Hybrid
from adapters._quantized import QuantizedOptimizer
from tests.threaded.muon_cases import CASES, shard, slice_of

Shape = tuple[int, ...]

# Below 256 elements, where a codebook takes no time to learn. More ranks than rows, one element,
# and one matrix that Hybrid leaves to its backup.
SHAPES: tuple[Shape, ...] = ((6, 8), (5, 9), (3, 3), (7,), (5, 3, 2), (1,), (4, 3, 2, 2), (2, 4))
MATRICES: tuple[Shape, ...] = ((6, 8), (5, 9), (9, 5), (3, 3), (1, 4), (4, 1), (2, 4))
# Enough for a codebook of 256 different levels.
LARGE: tuple[Shape, ...] = ((16, 24), (33, 5), (40,), (8, 3, 10), (30, 32))
NUM_STEPS = 5
# A rank that has none of a matrix orthogonalises nothing, and it does not matter which rows it has.
NEEDS_ELEMENTS = ("normuon_v", "normuon_step", "v_row")
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Recipe:
    """An optimizer with its options, and what it is given."""

    name: str
    cls: type[QuantizedOptimizer]
    options: dict[str, Any] = field(hash=False)
    shapes: tuple[Shape, ...] = SHAPES

    def make(self, params: Sequence[nn.Parameter]) -> QuantizedOptimizer:
        cls: Any = self.cls
        made: QuantizedOptimizer = cls(named(params), **{"lr": 0.01, **self.options})
        return made

    def is_exact(self, name: str, shape: Shape) -> bool:
        """Whether the parameter has the bits of one device."""
        return issubclass(self.cls, GefenMuon) or (
            issubclass(self.cls, Hybrid) and len(shape) == 2 and name != HEAD
        )


BY_OWNERS: dict[str, Any] = {"sharded_mode": "distributed"}
RECIPES = (
    Recipe("Gefen, factored", Gefen, {"weight_decay": 0.1}),
    Recipe(
        "Gefen, block",
        Gefen,
        {"factored_v_2d": False, "betas": (0.8, 0.95), "codebook_refresh_every": 2},
    ),
    Recipe(
        "GefenMuon, normuon and cautious",
        GefenMuon,
        {"normuon": True, "cautious": True, "ns_schedule": "tuned4", "nesterov": False},
        MATRICES,
    ),
    Recipe("Hybrid with Gefen", Hybrid, {"cautious": True, "backup_factored_v_2d": True}),
    Recipe("GefenMuon", GefenMuon, {"codebook_refresh_every": 3}, MATRICES),
    Recipe("Hybrid with AdamW", Hybrid, {"backup": "adamw", "weight_decay": 0.1}),
    Recipe("Hybrid, dense with Gefen", Hybrid, {"muon": "dense"}),
    Recipe("GefenMuon by owners", GefenMuon, {**BY_OWNERS, "nesterov": False}, MATRICES),
    Recipe(
        "GefenMuon by owners, normuon and cautious",
        GefenMuon,
        {**BY_OWNERS, "normuon": True, "cautious": True, "ns_schedule": "tuned4"},
        MATRICES,
    ),
    Recipe("Hybrid by owners", Hybrid, {**BY_OWNERS, "backup_factored_v_2d": True}),
    Recipe("Hybrid by owners, dense", Hybrid, {**BY_OWNERS, "muon": "dense", "backup": "adamw"}),
)


@dataclass(frozen=True)
class Layout:
    """Where the parameters lie; those at the positions ``plain`` are whole on each rank."""

    name: str
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    plain: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    def of(self, shape: Shape, position: int) -> tuple[Placement, ...] | None:
        """The placements of one parameter; a cut of a dim that it lacks cuts its first one."""
        if position in self.plain:
            return None
        return tuple(
            each if isinstance(each, Replicate) or _dim(each) < len(shape) else Shard(0)
            for each in self.placements
        )


def _dim(placement: Placement) -> int:
    dim = getattr(placement, "dim", 0)
    assert isinstance(dim, int)
    return dim


LAYOUTS = (
    Layout("one rank", (1,), (Shard(0),)),
    *(Layout(case.name, case.mesh, case.placements) for case in CASES if "large" not in case.name),
    Layout("the last dim that all have", (3,), (Shard(1),)),
    Layout("rows and the third dim", (2, 2), (Shard(0), Shard(2))),
    Layout("rows, and plain parameters", (3,), (Shard(0),), plain=(0, 3, 5)),
    Layout("columns, and plain parameters", (2, 2), (Replicate(), Shard(1)), plain=(1, 2)),
)


# All recipes are tried on these, and the first four on all layouts, as is one by owners: what is
# sharded in the others is sharded by the same code.
COMMON = ("rows on 4 ranks", "columns on 2 ranks", "HSDP", "FSDP over column TP")
CASES_OF = tuple(
    (recipe, layout)
    for recipe in RECIPES
    for layout in LAYOUTS
    if recipe in (*RECIPES[:4], RECIPES[8]) or layout.name in COMMON or layout.plain
)


def names(cases: Sequence[Layout | Recipe]) -> list[str]:
    return [case.name for case in cases]


def named(params: Sequence[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    last = len(params) - 1
    return [(HEAD if i == last else f"layer.{i}", param) for i, param in enumerate(params)]


def weights(shapes: Sequence[Shape]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(shapes: Sequence[Shape], step: int) -> list[Tensor | None]:
    """Every other one has rows of very different sizes, so that rows become its blocks.

    The first gradient of the second parameter comes late, and that of the third stays away once.
    """
    generator = torch.Generator().manual_seed(step)
    found: list[Tensor | None] = []
    for i, shape in enumerate(shapes):
        grad = torch.randn(shape, generator=generator) * 10.0 ** (i % 3 - 1)
        sizes = torch.randn(shape[:1], generator=torch.Generator().manual_seed(i)).mul(3).exp()
        if i % 2 == 0:
            grad = grad.sign() * sizes.view(-1, *[1] * (len(shape) - 1))
        found.append(grad)
    if step <= 2:
        found[1] = None
    if step == 3:
        found[2] = None
    return found


@dataclass
class Twins:
    """One model on one device, and the same on several."""

    mesh: DeviceMesh
    layout: Layout
    recipe: Recipe
    whole: list[nn.Parameter]
    sharded: list[nn.Parameter]

    @classmethod
    def of(cls, recipe: Recipe, layout: Layout, shapes: Sequence[Shape]) -> Twins:
        mesh = init_device_mesh("cpu", layout.mesh)
        whole = [nn.Parameter(weight) for weight in weights(shapes)]
        made = cls(mesh, layout, recipe, whole, [])
        made.sharded = [nn.Parameter(made.placed(each, i)) for i, each in enumerate(whole)]
        return made

    def placed(self, whole: Tensor, position: int) -> Tensor:
        placements = self.layout.of(tuple(whole.shape), position)
        whole = whole.detach()
        return whole.clone() if placements is None else shard(whole, self.mesh, placements)

    def part(self, whole: Tensor, position: int) -> Tensor:
        """What this rank holds of a tensor that is cut as a parameter is."""
        placements = self.layout.of(tuple(whole.shape), position)
        return whole.detach() if placements is None else slice_of(whole, self.mesh, placements)

    def set_gradients(self, step: int) -> None:
        for i, grad in enumerate(gradients([tuple(each.shape) for each in self.whole], step)):
            self.whole[i].grad = grad
            self.sharded[i].grad = None if grad is None else self.placed(grad, i)

    def differences(self, ours: QuantizedOptimizer, twin: QuantizedOptimizer) -> list[str]:
        """What is not that of one device, on this rank."""
        found = [] if records(ours) == records(twin) else ["codebook"]
        for i, (name, whole) in enumerate(named(self.whole)):
            mine, its = ours.state.get(self.sharded[i], {}), twin.state.get(whole, {})
            actual = local(self.sharded[i])
            exact = self.recipe.is_exact(name, tuple(whole.shape))
            if not close(actual, self.part(whole, i), exact=exact):
                found.append(f"weight of {name} {tuple(whole.shape)}")
            if actual.numel() or mine:
                found += self._state_differences(i, mine, its)
            elif its and "m_codebook" in its:
                found.append(f"no state of {name} {tuple(whole.shape)}")
        return found

    def _state_differences(
        self, position: int, mine: dict[str, Any], its: dict[str, Any]
    ) -> list[str]:
        shape = tuple(self.whole[position].shape)
        found = []
        for key, value in its.items():
            if key in NEEDS_ELEMENTS and not local(self.sharded[position]).numel():
                continue
            expected, actual = value, mine.get(key)
            if key == "normuon_v" and "normuon_rows" in mine:  # where owners compute
                expected = self.part(value.expand(shape), position)[:, :1]
                if not torch.equal(mine["normuon_rows"], expected):
                    found.append(f"normuon_rows of {position} {shape}")
                continue
            if isinstance(value, Tensor) and isinstance(actual, Tensor):
                expected, actual = self._own(key, value, position, its), local(actual)
                exact = key in ("m_codebook", "m_magnitude", "normuon_v", "momentum_buffer")
                equal = close(actual.flatten(), expected.flatten(), exact=exact)
            else:
                equal = type(actual) is type(expected) and actual == expected
            if not equal:
                found.append(f"{key} of {position} {shape}")
        return found

    def _own(self, key: str, value: Tensor, position: int, state: dict[str, Any]) -> Tensor:
        """What this rank keeps of the whole state."""
        shape = self.whole[position].shape
        elements = torch.arange(shape.numel()).view(shape)
        if key in ("m_codebook", "momentum_buffer", "exp_avg", "exp_avg_sq"):
            return self.part(value.view(shape), position)
        if key in ("m_magnitude", "vmean"):
            here = self.part(elements, position).flatten() // state["automatic_period"]
            return value.flatten()[torch.unique(here)]
        if key == "v_row":
            return value[torch.unique(self.part(elements, position) // shape[1])]
        return value


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def close(actual: Tensor, expected: Tensor, *, exact: bool) -> bool:
    """Equal, or but for the order in which squares are added; updates here are about 0.01."""
    if exact or actual.shape != expected.shape:
        return torch.equal(actual, expected)
    return torch.allclose(actual, expected, rtol=2e-6, atol=1e-7)


def records(optimizer: QuantizedOptimizer) -> list[Any]:
    """What belongs to no single parameter, as plain values."""
    found = []
    for rule in optimizer._rules:
        record = rule.momenta.record() if rule.momenta else {}
        levels = record.get("codebook")
        found.append((None if levels is None else levels.tolist(), record.get("global_step")))
    return found


def against_one_device(
    rank: int, recipe: Recipe, layout: Layout, shapes: tuple[Shape, ...]
) -> list[str]:
    """Train both; every rank returns what differs after any step, which should be nothing."""
    twins = Twins.of(recipe, layout, shapes)
    ours, twin = recipe.make(twins.sharded), recipe.make(twins.whole)
    found = []
    for step in range(1, NUM_STEPS + 1):
        twins.set_gradients(step)
        ours.step()
        twin.step()
        found += [f"step {step}: {each}" for each in twins.differences(ours, twin)]
    return found


def outcome(step: Callable[[], object]) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "stepped"
