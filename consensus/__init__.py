"""Agree before a collective: every rank proceeds, every rank skips, or every rank raises."""

from consensus import log
from consensus._sources import Source
from consensus._sum import agree_sum
from consensus.agree import ControlRange, agree_range, agree_same, any_failed, fail_together
from consensus.amp import GradScaler
from consensus.capture import CapturedStep
from consensus.errors import (
    ConsensusError,
    Disagreement,
    EnclosureError,
    Failure,
    GroupFailure,
    LateRanks,
    PhaseMismatch,
)
from consensus.groups import ControlGroup, control_device, control_group
from consensus.preflight import preflight
from consensus.recovery import recover
from consensus.revoke import revoke_when_stranded
from consensus.watch import watch

__all__ = [
    "CapturedStep",
    "ConsensusError",
    "ControlGroup",
    "ControlRange",
    "Disagreement",
    "EnclosureError",
    "Failure",
    "GradScaler",
    "GroupFailure",
    "LateRanks",
    "PhaseMismatch",
    "Source",
    "agree_range",
    "agree_same",
    "agree_sum",
    "any_failed",
    "control_device",
    "control_group",
    "fail_together",
    "log",
    "preflight",
    "recover",
    "revoke_when_stranded",
    "watch",
]
