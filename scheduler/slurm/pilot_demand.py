"""How many pilot nodes the pending jobs of a service can use: a pure decision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.slurm.slurm_client import SlurmJob


@dataclass(frozen=True, slots=True)
class PilotLimits:
    """Limits of automatic submission.

    Args:
        nodes_max: nodes of all pilots of the pool together, pending ones included.
        gpus_per_node: GPUs that each new node has.
    """

    nodes_max: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class PilotProposal:
    """Nodes to submit, one pilot each. `wanted` is their number without the cap."""

    nodes: int
    wanted: int
    pending_gpus: int


def propose_pilots(
    min_gpus: Iterable[int], free_gpus: int, pilots: Iterable[SlurmJob], limits: PilotLimits
) -> PilotProposal:
    """Return how many nodes to submit.

    Pending pilots count as if their nodes were there already, so that no demand is submitted twice.

    Args:
        min_gpus: smallest number of GPUs of each pending job.
        free_gpus: GPUs of the pool that no job holds.
        pilots: pilots of the pool that have not ended.
    """
    known = list(pilots)
    pending_gpus = sum(min_gpus)
    coming = sum(job.nodes for job in known if job.state in ("PENDING", "CONFIGURING"))
    missing_gpus = pending_gpus - free_gpus - coming * limits.gpus_per_node
    wanted = max(0, math.ceil(missing_gpus / limits.gpus_per_node))
    room = max(0, limits.nodes_max - sum(job.nodes for job in known))
    return PilotProposal(min(wanted, room), wanted, pending_gpus)
