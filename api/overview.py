"""The overview of the fleet and the list of pending jobs, for the console and other clients that poll."""

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
from api.identity.authorization import VIEWER, requires
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
    """`held`: GPUs that jobs hold. `inference`: GPUs that inference uses."""

    name: str
    pool: str
    state: NodeUse
    gpus: int
    held: int
    inference: int


class PoolSummaryView(TypedDict):
    """`capacity_gpus` excludes nodes that are down. `demand` and `forecast` are null for a training pool and before the
    first reading. `headroom_gpus` and `quantile` are the reserve that the pool's owner keeps from lending."""

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
    """A pending job, which needs at least `min_gpus`."""

    id: str
    name: str
    queue: str
    state: JobState
    min_gpus: int
    max_gpus: int
    submitted_at_s: AtSeconds


class WaitingJobView(WaitingJobSummaryView):
    """`reason` is null for a new job and for one that starts next. `position`: its place in the queue, from 1.
    `expected_start_s`: null if unknown."""

    reason: ReasonView | None
    position: int | None
    expected_start_s: AtSeconds | None


class WaitingView(TypedDict):
    """`items`: the jobs that have waited longest, as of `generation`. `reasons`: the number of pending jobs per
    reason."""

    generation: int
    reasons: dict[str, int]
    items: list[WaitingJobView]


class OverviewView(TypedDict):
    """The newest committed snapshot without the commands in the inbox; `switches` includes them.

    `complete`: `nodes` has all nodes. Otherwise it has the nodes that changed since the requested `generation`, and
    `gone` names the removed ones. `jobs` counts live jobs by state, `loans` live loans. `waiting` has the jobs that
    have waited longest, `queues` the queues that the caller may read. `newest_event`: the number after which to follow
    events.
    """

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
    """`sizes`: the GPU counts of the pool's nodes."""
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
    """`complete`: `nodes` has all nodes. Otherwise it has the changed nodes, and `gone` names the removed ones."""

    nodes: list[NodeSummaryView]
    gone: list[str]
    complete: bool


class NodeDeltas:
    """Keeps the node summaries of recent generations, to answer polling clients with changes only. Thread-safe.

    For a generation that is unknown, or known to another process only, the response holds all nodes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes_by_generation: OrderedDict[int, NodeSummaries] = OrderedDict()

    def since(self, generation: int | None, snapshot: Snapshot) -> NodeDelta:
        """Return the nodes that changed between `generation` and the committed snapshot."""
        with self._lock:
            nodes = self._nodes_by_generation.get(snapshot.generation)
            before = None if generation is None else self._nodes_by_generation.get(generation)
        if nodes is None:
            nodes = {name: node_summary_view(node, snapshot) for name, node in snapshot.nodes.items()}
            self._remember(snapshot.generation, nodes)
        if before is None:
            return NodeDelta(list(nodes.values()), [], complete=True)
        changed = [summary for name, summary in nodes.items() if before.get(name) != summary]
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
    Query(ge=0, lt=2**63, description="Of an earlier response. Only nodes that changed since are listed."),
]


@router.get("/overview")
@requires(VIEWER)
def get_overview(
    context: ContextDep, service: ServiceDep, request: Request, generation: GenerationParameter = None
) -> OverviewView:
    """Summarize pools, nodes, queues, loans and live jobs. With the `generation` of an earlier response, `nodes` holds
    only the nodes that changed since, if that generation is still cached."""
    snapshot, visibility = context.committed, context.visibility
    node_deltas = request.app.state.node_deltas
    assert isinstance(node_deltas, NodeDeltas)
    delta = node_deltas.since(generation, snapshot)
    sees_all = visibility.is_unrestricted
    visible_jobs = [
        job for job in snapshot.jobs.values() if not job.is_ended and (sees_all or visibility.can_see_job(job))
    ]
    uses = compute_queue_usage(snapshot)
    return {
        "generation": snapshot.generation,
        "now_s": context.now_s,
        "complete": delta.complete,
        "leader": service.has_leader,
        "pools": _pool_summaries(snapshot),
        "nodes": delta.nodes,
        "gone": delta.gone,
        "queues": [queue_view(use) for name, use in uses.items() if context.principal.has_role(Role.VIEWER, name)],
        "waiting": [
            waiting_job_summary_view(job)
            for job in nsmallest(WAITING_JOBS_DEFAULT, filter(_is_waiting, visible_jobs), key=get_job_sort_key)
        ],
        "jobs": dict(Counter(job.state.value for job in visible_jobs)),
        "loans": dict(Counter(loan.state.value for loan in snapshot.loans.values() if loan.is_live)),
        "switches": switches_view(context.snapshot),
        "newest_event": service.store.get_last_event_number(),
    }


@router.get("/waiting")
@requires(VIEWER)
def list_waiting(
    context: ContextDep, request: Request, limit: Annotated[int, Query(ge=1, le=100)] = WAITING_JOBS_DEFAULT
) -> WaitingView:
    """List the jobs that have waited longest, each with its reason, and the number of jobs per reason. The state may be
    slightly older than the newest."""
    cache = request.app.state.pending_reasons
    assert isinstance(cache, PendingReasonCache)
    pending, visibility = cache.read(context.committed), context.visibility
    waiting = [
        job
        for job in pending.snapshot.jobs.values()
        if _is_waiting(job) and (visibility.is_unrestricted or visibility.can_see_job(job))
    ]
    longest = nsmallest(limit, waiting, key=get_job_sort_key)
    codes = (pending.reasons[job.id].code.value for job in waiting if job.id in pending.reasons)
    items = [waiting_job_view(job, pending.explain(job.id)) for job in longest]
    view: WaitingView = {"generation": pending.snapshot.generation, "reasons": dict(Counter(codes)), "items": items}
    return context.redact(view)


def _is_waiting(job: Job) -> bool:
    return job.state in WAITING_STATES and job.intent is Intent.RUN


def _pool_summaries(snapshot: Snapshot) -> list[PoolSummaryView]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for node in snapshot.nodes.values():
        sizes[node.pool].append(node.gpus)
    return [pool_summary_view(pool, snapshot, sizes[name]) for name, pool in sorted(snapshot.pools.items())]
