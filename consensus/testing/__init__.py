"""Hang regression tests: ranks on real processes, as threads or simulated, and faults for them."""

from consensus.testing._faults import inject, without_agreement
from consensus.testing._processes import run_ranks
from consensus.testing._ranks import RankError, RankResult, Ranks
from consensus.testing._simulate import Deadlock, Simulation, simulate
from consensus.testing._snapshot import Snapshot, assert_unchanged, snapshot
from consensus.testing._threads import run_threads

__all__ = [
    "Deadlock",
    "RankError",
    "RankResult",
    "Ranks",
    "Simulation",
    "Snapshot",
    "assert_unchanged",
    "inject",
    "run_ranks",
    "run_threads",
    "simulate",
    "snapshot",
    "without_agreement",
]
