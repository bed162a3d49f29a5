"""Hang regression tests: ranks as processes, as threads or simulated, faults for them, and laws."""

from consensus.testing import faults
from consensus.testing._conformance import Conformance, Verdict, conformance
from consensus.testing._faults import inject, without_agreement
from consensus.testing._laws import LAWS, Law
from consensus.testing._processes import run_ranks
from consensus.testing._ranks import RankError, RankResult, Ranks
from consensus.testing._simulate import Deadlock, Simulation, simulate
from consensus.testing._snapshot import Snapshot, assert_unchanged, snapshot
from consensus.testing._threads import run_threads

__all__ = [
    "LAWS",
    "Conformance",
    "Deadlock",
    "Law",
    "RankError",
    "RankResult",
    "Ranks",
    "Simulation",
    "Snapshot",
    "Verdict",
    "assert_unchanged",
    "conformance",
    "faults",
    "inject",
    "run_ranks",
    "run_threads",
    "simulate",
    "snapshot",
    "without_agreement",
]
