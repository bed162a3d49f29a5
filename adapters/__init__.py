"""Optimizers whose ranks agree before any of them writes."""

from adapters.muon import Muon

__all__ = ["Muon"]
