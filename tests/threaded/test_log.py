"""What the agreement log holds of ranks that plan, make a control group, and vote."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from consensus import Disagreement, EnclosureError, any_failed, control_group, log
from consensus.testing import run_threads

LIVENESS_S = 30.0


def votes_in_a_chain(rank: int) -> None:
    """Ranks 0, 1 and ranks 1, 2: rank 1 ties them, so all three agree."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [1, 2])]
    own = [mesh for mesh in meshes if rank in mesh.mesh.tolist()]
    any_failed(False, control_group(own))


def test_planning_and_making_a_group_are_logged_before_its_votes() -> None:
    log.clear()
    run_threads(votes_in_a_chain, 3, timeout=LIVENESS_S).values()
    for rank in range(3):
        own = [each for each in log.records() if each.rank == rank]
        assert [each.phase for each in own] == [
            "planning",
            "making the control group",
            "any_failed",
        ]
        assert [each.decision for each in own] == ["agreed"] * 3
        assert [each.messages for each in own] == [None, None, 1]
        assert [each.members for each in own] == [3, 3, 3]
        ends = [each.start_ns + each.duration_ns for each in own]
        assert ends == sorted(ends)


def wants_another_backend(rank: int) -> None:
    with pytest.raises(EnclosureError):
        control_group(dist.group.WORLD, backend="store" if rank else "auto").connect()


def test_ranks_that_want_different_groups_are_refused() -> None:
    log.clear()
    run_threads(wants_another_backend, 2, timeout=LIVENESS_S).values()
    found = [(each.phase, each.decision) for each in log.records()]
    assert found == [("making the control group", "refused")] * 2


def plans_for_another_group(rank: int) -> None:
    """Two meshes of the same ranks, each with a group of its own."""
    meshes = [DeviceMesh("cpu", [0, 1]) for _ in range(2)]
    if rank == 2:  # without it the group is that of the whole job, and needs no planning
        return
    with pytest.raises(Disagreement):
        control_group(meshes[rank], backend="inherit").connect()


def test_ranks_that_plan_with_different_groups_disagree() -> None:
    log.clear()
    run_threads(plans_for_another_group, 3, timeout=LIVENESS_S).values()
    found = [(each.phase, each.decision) for each in log.records()]
    assert found == [("planning", "disagreed")] * 2
