"""How many nodes are proposed for pending jobs."""

from __future__ import annotations

import pytest

from scheduler.slurm.pilot_demand import PilotLimits, PilotProposal, propose_pilots
from scheduler.slurm.slurm_client import SlurmJob

LIMITS = PilotLimits(nodes_max=4, gpus_per_node=8)


def a_pilot(state: str, nodes: int = 1) -> SlurmJob:
    return SlurmJob("1", "ebbtide-training", state, nodes, None, "")


@pytest.mark.parametrize(
    ("min_gpus", "free_gpus", "pilots", "nodes", "wanted"),
    [
        ([], 0, [], 0, 0),
        ([8], 0, [], 1, 1),
        ([4, 4, 4], 0, [], 2, 2),
        ([8], 8, [], 0, 0),
        ([9], 8, [], 1, 1),
        ([8], 0, [a_pilot("PENDING")], 0, 0),
        ([8], 0, [a_pilot("RUNNING")], 1, 1),
        ([64], 0, [], 4, 8),
        ([64], 0, [a_pilot("RUNNING", 3)], 1, 8),
        ([64], 0, [a_pilot("RUNNING", 6)], 0, 8),
    ],
)
def test_nodes_cover_missing_gpus_within_the_cap(
    min_gpus: list[int], free_gpus: int, pilots: list[SlurmJob], nodes: int, wanted: int
) -> None:
    assert propose_pilots(min_gpus, free_gpus, pilots, LIMITS) == PilotProposal(nodes, wanted, sum(min_gpus))
