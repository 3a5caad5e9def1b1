"""The pilots that pending jobs of a service need, read from the service."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.exit_codes import InputError

if TYPE_CHECKING:
    from ebbtide.client import Client
    from ebbtide.client.views import MachineView, NodeView
    from scheduler.slurm.pilot_demand import PilotLimits, PilotProposal
    from scheduler.slurm.slurm_client import SlurmJob

_JOBS_MAX = 100


@dataclass(frozen=True, slots=True)
class PilotDemand:
    """The pilots that pending jobs can use.

    Args:
        unmatched_jobs: pending jobs that require a GPU model, while that of new nodes is unknown.
    """

    proposal: PilotProposal
    unmatched_jobs: int


def read_pilot_demand(
    client: Client, pilots: Collection[SlurmJob], limits: PilotLimits, *, pool: str, gpu: str
) -> PilotDemand:
    """Return the pilots that pending jobs can use now.

    Args:
        pilots: pilots of the pool that have not ended.
        gpu: GPU model of new nodes; empty for that of the pool's nodes.

    Raises:
        InputError: the GPU model does not exist, or the pool has several.
    """
    from scheduler.domain.decisions import ReasonCode
    from scheduler.slurm.pilot_demand import (
        REASONS_OF_SHORTAGE,
        PendingJob,
        PilotSupply,
        count_coming_nodes,
        propose_pilots,
        select_startable_jobs,
    )

    nodes, machines = list(client.nodes()), list(client.machines())
    gpu = choose_gpu_model(gpu, pool, nodes, machines)
    serving = [node for node in nodes if node["serves_training"]]
    # Plans are solved for the kinds of nodes that exist. Without any, jobs that need one wait for a plan.
    codes = (*REASONS_OF_SHORTAGE, *(() if serving else (ReasonCode.WAITING_FOR_PLAN,)))
    waiting = client.waiting(limit=_JOBS_MAX, reasons=codes, gpu=gpu)["items"]
    matched = [
        PendingJob(job["queue"], job["min_gpus"], ReasonCode(job["reason"]["code"]))
        for job in waiting
        if job["reason"] is not None and (gpu or not job["gpu"])
    ]
    headroom = {
        queue["name"]: queue["limit_gpus"] - queue["used_gpus"]
        for queue in client.queues()
        if queue["limit_gpus"] is not None
    }
    supply = PilotSupply(
        free_gpus=sum(_count_free_gpus(node) for node in serving if gpu in ("", node["gpu"])),
        coming_nodes=count_coming_nodes(pilots, [machine["name"] for machine in machines]),
        submitted_nodes=sum(job.nodes for job in pilots),
    )
    proposal = propose_pilots(select_startable_jobs(matched, limits, headroom), supply, limits)
    return PilotDemand(proposal, len(waiting) - len(matched))


def choose_gpu_model(stated: str, pool: str, nodes: Sequence[NodeView], machines: Sequence[MachineView]) -> str:
    """Return the GPU model of new nodes: the stated one, else that of the pool's nodes, else that of machines that
    were in the pool. An empty text means that it is unknown.

    Raises:
        InputError: the stated model does not exist, or the pool has several.
    """
    from scheduler.domain.suggestions import suggest
    from scheduler.solver.profiles.catalog import list_gpu_names

    if stated:
        known = sorted({*list_gpu_names(), *(each["gpu"] for each in (*nodes, *machines))})
        if stated not in known:
            raise InputError(f"--gpu: got {stated!r}; allowed: {', '.join(known)}{suggest(stated, known)}")
        return stated
    present = {node["gpu"] for node in nodes if node["pool"] == pool}
    models = sorted(present or {machine["gpu"] for machine in machines if machine["pool"] == pool})
    if len(models) > 1:
        raise InputError(
            f"--gpu: pool {pool} has nodes with {', '.join(models)}. State the model of new nodes, such as "
            f"--gpu {models[0]}."
        )
    return models[0] if models else ""


def _count_free_gpus(node: NodeView) -> int:
    return node["gpus"] - node["other_gpus"] - sum(map(len, node["jobs"].values()))
