"""What a run of the demo is asked to do, and the bounds it promises to keep."""

from __future__ import annotations

from dataclasses import dataclass

FAULT_NAMES = (
    "closure",
    "overflow",
    "missing-grad",
    "order",
    "forward",
    "backward",
    "kill",
    "none",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """An optimizer that the demo can train with."""

    path: str  # "package:Class": this package knows no optimizer
    lr: float
    whole_model: bool  # or the hidden matrices only, and AdamW steps the rest


OPTIMIZERS = {
    "muon": Choice("adapters:Muon", 0.02, whole_model=False),
    "gefen": Choice("adapters:Gefen", 3e-3, whole_model=True),
    "gefen-muon": Choice("adapters:GefenMuon", 0.02, whole_model=False),
    "hybrid": Choice("adapters:Hybrid", 0.01, whole_model=True),
}

AFTER = 5  # healthy steps after a fault from which the group may go on

DATA_PLANE_S = 60.0  # a collective of the data plane gives up after this
GIVE_UP_S = 4.0  # a rank that failed waits this long for its peers, then raises alone
NOTICE_S = 10.0  # promised: all ranks know of a fault within this; milliseconds are usual
RELEASE_S = 20.0  # promised: the same when peers sit inside the data plane
HANG_S = 8.0  # without agreement: what ends a hang


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of the demo."""

    ranks: int
    steps: int  # before the fault
    fault: str  # one of FAULT_NAMES
    optimizer: str  # a key of OPTIMIZERS
    unguarded: bool  # every rank decides alone

    @property
    def guilty(self) -> int:
        """The rank on which the fault happens."""
        return 1

    @property
    def steps_after(self) -> int:
        """Healthy steps to take when the group may go on after the fault."""
        return 0 if self.unguarded or self.fault == "none" else AFTER

    @property
    def data_plane_s(self) -> float:
        """Seconds after which a collective of the data plane gives up."""
        return HANG_S if self.unguarded else DATA_PLANE_S

    @property
    def deadline_s(self) -> float:
        """Seconds after which ranks are killed; reached only if a promise is broken."""
        return 60.0 + 2.0 * (self.steps + self.steps_after) + self.data_plane_s + RELEASE_S
