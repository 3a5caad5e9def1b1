"""The whole fleet at a glance as an answer: small enough to be asked for again and again.

Glances: how the nodes stood at the generations that were asked about last, so that a page learns what changed.

The whole fleet at a glance and who waits why, for the console and whoever wants to look without asking ten
questions.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Annotated, Literal

from fastapi import Query, Request
from typing_extensions import TypedDict

from api.event_views import ReasonView, reason_view
from api.explanations import PendingReasonCache
from api.http.dependencies import ContextDep, ServiceDep, create_router
from api.http.paging import AtSeconds
from api.identity.principals import Role
from api.loans import SwitchesView, switches_view
from api.pools import DemandView, ForecastView, demand_view, forecast_view
from api.queues import QueueView, queue_view
from scheduler.domain.fleet import LoanState, Node, NodeState, Pool, PoolKind
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import WAITING_STATES, JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.explanation import Explanation
from scheduler.scheduling.policies.quota import compute_queue_usage
from scheduler.store.api_protocol import get_job_sort_key

NodeUse = Literal["training", "inference", "idle", "offered", "lent", "recalled", "cordoned", "down"]
_USE_BY_LOAN_STATE: Mapping[LoanState, NodeUse] = {
    LoanState.OFFERED: "offered",
    LoanState.ACTIVE: "lent",
    LoanState.RECALLED: "recalled",
}


class NodeSummaryView(TypedDict):
    """`held`: GPUs that jobs hold, `inference`: those that inference uses."""

    name: str
    pool: str
    state: NodeUse
    gpus: int
    held: int
    inference: int


class PoolSummaryView(TypedDict):
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


class WaitingJobSummaryView(TypedDict):
    """A job that waits for GPUs, `min_gpus` at the least."""

    id: str
    name: str
    queue: str
    state: JobState
    min_gpus: int
    max_gpus: int
    submitted_at_s: AtSeconds


class WaitingJobView(WaitingJobSummaryView):
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
    pools: list[PoolSummaryView]
    nodes: list[NodeSummaryView]
    gone: list[str]
    queues: list[QueueView]
    waiting: list[WaitingJobSummaryView]
    jobs: dict[str, int]
    loans: dict[str, int]
    switches: SwitchesView
    newest_event: int


def node_summary_view(node: Node, snapshot: Snapshot) -> NodeSummaryView:
    held = len(snapshot.index.holders.get(node.name, ()))
    return {
        "name": node.name,
        "pool": node.pool,
        "state": _node_use(node, snapshot, held),
        "gpus": node.gpus,
        "held": held,
        "inference": node.inference_gpus,
    }


def pool_summary_view(pool: Pool, snapshot: Snapshot, sizes: list[int]) -> PoolSummaryView:
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


def waiting_job_summary_view(job: Job) -> WaitingJobSummaryView:
    return {
        "id": job.id,
        "name": job.spec.name,
        "queue": job.spec.queue,
        "state": job.state,
        "min_gpus": job.spec.min_gpus,
        "max_gpus": job.spec.max_gpus,
        "submitted_at_s": job.submitted_at_s,
    }


def waiting_job_view(job: Job, explanation: Explanation) -> WaitingJobView:
    return {
        **waiting_job_summary_view(job),
        "reason": reason_view(explanation.reason) if explanation.reason else None,
        "position": explanation.position,
        "expected_start_s": explanation.expected_start_s,
    }


def _node_use(node: Node, snapshot: Snapshot, held: int) -> NodeUse:
    loan = snapshot.loans.get(node.name)
    if node.state is NodeState.DOWN:
        return "down"
    if loan is not None and loan.is_live:
        return _USE_BY_LOAN_STATE[loan.state]
    if node.cordoned:
        return "cordoned"
    if held:
        return "training"
    return "inference" if node.inference_gpus else "idle"


GENERATIONS_KEPT = 32

NodeSummaries = Mapping[str, NodeSummaryView]


@dataclass(frozen=True, slots=True)
class NodeDelta:
    """`complete`: `nodes` are all nodes; else those that differ, and `gone` are no more."""

    nodes: list[NodeSummaryView]
    gone: list[str]
    complete: bool


class NodeDeltas:
    """Safe to use from several threads. A generation that was forgotten, or is another process's, costs a whole
    answer and nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes_by_generation: OrderedDict[int, NodeSummaries] = OrderedDict()

    def since(self, generation: int | None, snapshot: Snapshot) -> NodeDelta:
        """What has changed in the nodes of a committed snapshot since `generation`."""
        with self._lock:
            nodes = self._nodes_by_generation.get(snapshot.generation)
            before = None if generation is None else self._nodes_by_generation.get(generation)
        if nodes is None:
            nodes = {name: node_summary_view(node, snapshot) for name, node in snapshot.nodes.items()}
            self._remember(snapshot.generation, nodes)
        if before is None:
            return NodeDelta(list(nodes.values()), [], complete=True)
        changed = [glance for name, glance in nodes.items() if before.get(name) != glance]
        return NodeDelta(changed, [name for name in before if name not in nodes], complete=False)

    def _remember(self, generation: int, nodes: NodeSummaries) -> None:
        with self._lock:
            self._nodes_by_generation[generation] = nodes
            while len(self._nodes_by_generation) > GENERATIONS_KEPT:
                self._nodes_by_generation.popitem(last=False)


router = create_router("fleet")

WAITING_JOBS_DEFAULT = 10
GenerationParameter = Annotated[
    int | None,
    Query(ge=0, lt=2**63, description="Of an earlier answer: only nodes that have changed since are told."),
]


@router.get("/overview")
def get_overview(
    context: ContextDep, service: ServiceDep, request: Request, generation: GenerationParameter = None
) -> OverviewView:
    """Pools, nodes, queues, loans and live jobs as counts. With the `generation` of an earlier answer it tells of
    nodes only what has changed since, where that is still known."""
    snapshot, sight = context.committed, context.visibility
    glances = request.app.state.glances
    assert isinstance(glances, NodeDeltas)
    changes = glances.since(generation, snapshot)
    sees_all = sight.is_unrestricted
    seen = [job for job in snapshot.jobs.values() if not job.is_ended and (sees_all or sight.can_see_job(job))]
    uses = compute_queue_usage(snapshot)
    return {
        "generation": snapshot.generation,
        "now_s": context.now_s,
        "complete": changes.complete,
        "leader": service.has_leader,
        "pools": _pool_summaries(snapshot),
        "nodes": changes.nodes,
        "gone": changes.gone,
        "queues": [queue_view(use) for name, use in uses.items() if context.principal.has_role(Role.VIEWER, name)],
        "waiting": [
            waiting_job_summary_view(job)
            for job in nsmallest(WAITING_JOBS_DEFAULT, filter(_is_waiting, seen), key=get_job_sort_key)
        ],
        "jobs": dict(Counter(job.state.value for job in seen)),
        "loans": dict(Counter(loan.state.value for loan in snapshot.loans.values() if loan.is_live)),
        "switches": switches_view(context.snapshot),
        "newest_event": service.store.get_last_event_number(),
    }


@router.get("/waiting")
def list_waiting(
    context: ContextDep, request: Request, limit: Annotated[int, Query(ge=1, le=100)] = WAITING_JOBS_DEFAULT
) -> WaitingView:
    """The jobs that have waited longest, each with the reason in words, and how many wait for which reason. It may be
    of a state shortly before the newest."""
    reasons = request.app.state.reasons
    assert isinstance(reasons, PendingReasonCache)
    told, sight = reasons.read(context.committed), context.visibility
    waiting = [
        job
        for job in told.snapshot.jobs.values()
        if _is_waiting(job) and (sight.is_unrestricted or sight.can_see_job(job))
    ]
    longest = nsmallest(limit, waiting, key=get_job_sort_key)
    codes = (told.reasons[job.id].code.value for job in waiting if job.id in told.reasons)
    items = [waiting_job_view(job, told.explain(job.id)) for job in longest]
    view: WaitingView = {"generation": told.snapshot.generation, "reasons": dict(Counter(codes)), "items": items}
    return context.redact(view)


def _is_waiting(job: Job) -> bool:
    return job.state in WAITING_STATES and job.intent is Intent.RUN


def _pool_summaries(snapshot: Snapshot) -> list[PoolSummaryView]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for node in snapshot.nodes.values():
        sizes[node.pool].append(node.gpus)
    return [pool_summary_view(pool, snapshot, sizes[name]) for name, pool in sorted(snapshot.pools.items())]
