"""The whole fleet at a glance as an answer: small enough to be asked for again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from typing_extensions import TypedDict

from api.answers.fleet import DemandView, ForecastView, demand_view, forecast_view
from api.answers.loan import SwitchesView
from api.answers.page import AtSeconds
from api.answers.queue import QueueView
from api.answers.record import ReasonView, reason_view
from scheduler.core.explain import Explanation
from scheduler.domain.fleet import Node, NodeState, Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.loan import LoanState
from scheduler.domain.snapshot import Snapshot

NodeUse = Literal["training", "inference", "idle", "offered", "lent", "recalled", "cordoned", "down"]
_LENDING: Mapping[LoanState, NodeUse] = {
    LoanState.OFFERED: "offered",
    LoanState.ACTIVE: "lent",
    LoanState.RECALLED: "recalled",
}


class NodeGlance(TypedDict):
    """`held`: GPUs that jobs hold, `inference`: those that inference uses."""

    name: str
    pool: str
    state: NodeUse
    gpus: int
    held: int
    inference: int


class PoolGlance(TypedDict):
    """`capacity_gpus` leaves out nodes that are down. `demand` and `forecast` are null for a training pool, and while
    nothing is known. `headroom_gpus` and `quantile` are what the pool's owner keeps free of loans."""

    name: str
    kind: PoolKind
    nodes: int
    gpus: int
    capacity_gpus: int
    demand: DemandView | None
    forecast: ForecastView | None
    headroom_gpus: float
    quantile: float


class WaitingJob(TypedDict):
    """A job that waits for GPUs, `min_gpus` at the least."""

    id: str
    name: str
    queue: str
    state: JobState
    min_gpus: int
    max_gpus: int
    submitted_at_s: AtSeconds


class WaitingJobView(WaitingJob):
    """`reason` is null for a job that has just come, or starts next. `position`: its place in line, from 1.
    `expected_start_s`: null where nobody can tell."""

    reason: ReasonView | None
    position: int | None
    expected_start_s: AtSeconds | None


class WaitingView(TypedDict):
    """`items`: those that have waited longest, as of `generation`. `reasons`: how many jobs wait, by reason."""

    generation: int
    reasons: dict[str, int]
    items: list[WaitingJobView]


class OverviewView(TypedDict):
    """The newest committed snapshot, without what waits in the inbox; `switches` are as they will be.

    `complete`: `nodes` are all nodes, else those that differ from the `generation` asked for, and `gone` have left
    since. `jobs` counts live jobs by state, `loans` live loans. `waiting` are those that have waited longest, `queues`
    those that one may read. `newest_event`: the number from which the stream of events goes on."""

    generation: int
    now_s: AtSeconds
    complete: bool
    leader: bool
    pools: list[PoolGlance]
    nodes: list[NodeGlance]
    gone: list[str]
    queues: list[QueueView]
    waiting: list[WaitingJob]
    jobs: dict[str, int]
    loans: dict[str, int]
    switches: SwitchesView
    newest_event: int


def node_glance(node: Node, snapshot: Snapshot) -> NodeGlance:
    held = len(snapshot.ledger.holders.get(node.name, ()))
    return {
        "name": node.name,
        "pool": node.pool,
        "state": _use(node, snapshot, held),
        "gpus": node.gpus,
        "held": held,
        "inference": node.inference_gpus,
    }


def pool_glance(pool: Pool, snapshot: Snapshot, sizes: list[int]) -> PoolGlance:
    """`sizes`: the GPUs of each of its nodes."""
    reading, forecast = snapshot.demand.get(pool.name), snapshot.forecasts.get(pool.name)
    return {
        "name": pool.name,
        "kind": pool.kind,
        "nodes": len(sizes),
        "gpus": sum(sizes),
        "capacity_gpus": snapshot.capacity(pool.name),
        "demand": demand_view(reading) if reading else None,
        "forecast": forecast_view(forecast) if forecast else None,
        "headroom_gpus": pool.lending.headroom * snapshot.capacity(pool.name),
        "quantile": pool.lending.quantile,
    }


def waiting_job(job: Job) -> WaitingJob:
    return {
        "id": job.id,
        "name": job.spec.name,
        "queue": job.spec.queue,
        "state": job.state,
        "min_gpus": job.spec.min_gpus,
        "max_gpus": job.spec.max_gpus,
        "submitted_at_s": job.submitted_at_s,
    }


def waiting_job_view(job: Job, why: Explanation) -> WaitingJobView:
    return {
        **waiting_job(job),
        "reason": reason_view(why.reason) if why.reason else None,
        "position": why.position,
        "expected_start_s": why.expected_start_s,
    }


def _use(node: Node, snapshot: Snapshot, held: int) -> NodeUse:
    loan = snapshot.loans.get(node.name)
    if node.state is NodeState.DOWN:
        return "down"
    if loan is not None and loan.is_live:
        return _LENDING[loan.state]
    if node.cordoned:
        return "cordoned"
    if held:
        return "training"
    return "inference" if node.inference_gpus else "idle"
