"""Optimizers whose ranks agree before any of them writes."""

from adapters._target import empty_state
from adapters.gefen import Gefen, GefenMuon
from adapters.hybrid import Hybrid
from adapters.muon import Muon

__all__ = ["Gefen", "GefenMuon", "Hybrid", "Muon", "empty_state"]
