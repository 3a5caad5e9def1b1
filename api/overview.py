"""The overview of the fleet and the list of pending jobs, for the console and other clients that poll."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Annotated

from fastapi import Query, Request
from pydantic import Field
from typing_extensions import TypedDict

from api.event_views import ReasonView, reason_view
from api.explanations import PendingReasonCache
from api.http.dependencies import ContextDep, ServiceDep, create_router
from api.http.errors import raise_invalid_field
from api.http.paging import TEXT_PATTERN
from api.identity.authorization import VIEWER, requires
from api.identity.principals import Role
from api.loans import SwitchesView, switches_view
from api.pool_views import DemandView, ForecastView, ShortagesView, demand_view, forecast_view, shortages_view
from api.queues import QueueView, queue_view
from scheduler.domain.decisions import ReasonCode
from scheduler.domain.fleet import Node, Pool, PoolKind, get_shortages
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import WAITING_STATES, JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.suggestions import suggest
from scheduler.scheduling.capacity_use import NodeUse, find_node_use
from scheduler.scheduling.explanation import Explanation
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.scheduling.policies.quota import compute_queue_usage
from scheduler.store.api_protocol import get_job_sort_key


class NodeSummaryView(TypedDict):
    """One node in the overview."""

    name: Annotated[str, Field(description="Host name, unique in the fleet.")]
    pool: Annotated[str, Field(description="Pool that owns it, lent or not.")]
    gpu: Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`.")]
    state: Annotated[
        NodeUse, Field(description="Present use. Cordoned and down take precedence over the state of a loan.")
    ]
    gpus: Annotated[int, Field(description="Number of GPUs of this host.")]
    held: Annotated[int, Field(description="Number of GPUs that jobs hold.")]
    inference: Annotated[int, Field(description="Number of GPUs that inference uses.")]
    lent: Annotated[int, Field(description="Number of GPUs on loan to training: all, or some in a partial loan.")]


class PoolSummaryView(TypedDict):
    """One pool in the overview."""

    name: Annotated[str, Field(description="Unique label chosen at creation.")]
    kind: Annotated[PoolKind, Field(description="Whether its nodes run training jobs or serve inference.")]
    nodes: Annotated[int, Field(description="Number of hosts, including those that are down.")]
    gpus: Annotated[int, Field(description="Number of GPUs of all its nodes.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]
    demand: Annotated[
        DemandView | None,
        Field(description="Latest reading of what inference needs. Null: a training pool, or no reading yet."),
    ]
    forecast: Annotated[
        ForecastView | None,
        Field(description="Latest prediction of what inference will need. Null: a training pool, or too few readings."),
    ]
    headroom_gpus: Annotated[
        float, Field(description="Number of GPUs that the lending policy keeps free in addition to the forecast.")
    ]
    quantile: Annotated[
        float,
        Field(description="Quantile of the forecast that nodes that are not lent must cover now, between 0 and 1."),
    ]
    shortages: Annotated[ShortagesView, Field(description="Intervals in which loans left its inference short.")]


class WaitingJobSummaryView(TypedDict):
    """A pending job in a list."""

    id: Annotated[str, Field(description="Unique id: the name and ten random characters.")]
    name: Annotated[str, Field(description="Display name from its document.")]
    queue: Annotated[str, Field(description="Queue whose GPU quota is charged.")]
    state: Annotated[JobState, Field(description="Where it is in its life cycle.")]
    min_gpus: Annotated[int, Field(description="Fewest GPUs that it can run on.")]
    max_gpus: Annotated[int, Field(description="Most GPUs that it can use.")]
    submitted_at_s: Annotated[float, Field(description="Time of submission, in seconds since 1970 (UTC).")]


class WaitingJobView(WaitingJobSummaryView):
    """A pending job with the reason why it waits."""

    reason: Annotated[
        ReasonView | None, Field(description="Why it does not start. Null: new, or starting at the next tick.")
    ]
    gpu: Annotated[str, Field(description="GPU model that the job requires. Empty: any.")]
    position: Annotated[int | None, Field(description="Place in the queue, from 1. Null: not placed in it yet.")]
    expected_start_s: Annotated[
        float | None, Field(description="Estimated start, in seconds since 1970 (UTC). Null: unknown.")
    ]


class WaitingView(TypedDict):
    """The jobs that have waited longest."""

    generation: Annotated[
        int,
        Field(description="Snapshot that the reasons were computed from. It may be slightly older than the newest."),
    ]
    as_of_s: Annotated[float, Field(description="Time of that snapshot, in seconds since 1970 (UTC).")]
    reasons: Annotated[dict[str, int], Field(description="Number of pending jobs by reason code.")]
    items: Annotated[list[WaitingJobView], Field(description="The jobs, oldest submission first.")]


class OverviewView(TypedDict):
    """The newest committed snapshot without the commands in the inbox. Only `switches` includes them."""

    generation: Annotated[int, Field(description="Number of the committed snapshot, to send with the next request.")]
    now_s: Annotated[float, Field(description="Time of the response, in seconds since 1970 (UTC).")]
    complete: Annotated[
        bool,
        Field(
            description=(
                "Whether `nodes` has all nodes. Otherwise it has those that changed since the requested generation."
            )
        ),
    ]
    leader: Annotated[bool, Field(description="Whether a controller leads, so that commands take effect.")]
    pools: Annotated[list[PoolSummaryView], Field(description="All pools with demand and forecast, by name.")]
    nodes: Annotated[
        list[NodeSummaryView], Field(description="Nodes with their use: all of them, or those that changed.")
    ]
    gone: Annotated[
        list[str],
        Field(description="Names of nodes that were removed since the requested generation. Empty if `complete`."),
    ]
    queues: Annotated[list[QueueView], Field(description="Quota and usage of the queues that the caller may read.")]
    waiting: Annotated[list[WaitingJobSummaryView], Field(description="The ten jobs that have waited longest.")]
    jobs: Annotated[dict[str, int], Field(description="Number of live jobs that the caller may see, by state.")]
    loans: Annotated[dict[str, int], Field(description="Number of live loans by state.")]
    switches: Annotated[SwitchesView, Field(description="Fleet-wide switches, including those in the inbox.")]
    newest_event: Annotated[int, Field(description="Number after which to follow events. 0: there are none.")]


def node_summary_view(node: Node, snapshot: Snapshot) -> NodeSummaryView:
    held, loan = len(snapshot.index.holders.get(node.name, ())), snapshot.loans.get(node.name)
    return {
        "name": node.name,
        "pool": node.pool,
        "gpu": node.gpu,
        "state": find_node_use(node, snapshot, held),
        "gpus": node.gpus,
        "held": held,
        "inference": node.inference_gpus,
        "lent": loan.count_gpus(node) if loan is not None and loan.is_lent else 0,
    }


def pool_summary_view(pool: Pool, snapshot: Snapshot, sizes: list[int]) -> PoolSummaryView:
    """`sizes`: the GPU counts of the pool's nodes."""
    reading, forecast = snapshot.demand.get(pool.name), snapshot.forecasts.get(pool.name)
    record = get_shortages(snapshot.demand, pool.name)
    return {
        "name": pool.name,
        "kind": pool.kind,
        "nodes": len(sizes),
        "gpus": sum(sizes),
        "capacity_gpus": snapshot.capacity(pool.name),
        "demand": demand_view(reading) if reading else None,
        "forecast": forecast_view(forecast) if forecast else None,
        "headroom_gpus": pool.lending.headroom * snapshot.capacity(pool.name),
        "quantile": find_working_quantile(pool.lending, record),
        "shortages": shortages_view(pool.lending, record),
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
        "gpu": job.spec.gpu,
        "position": explanation.position,
        "expected_start_s": explanation.expected_start_s,
    }


GENERATIONS_KEPT = 32

NodeSummaries = Mapping[str, NodeSummaryView]


@dataclass(frozen=True, slots=True)
class NodeDelta:
    """`complete`: `nodes` has all nodes. Otherwise it has the changed nodes, and `gone` names the removed ones."""

    nodes: list[NodeSummaryView]
    gone: list[str]
    complete: bool


class NodeDeltas:
    """Node summaries of recent generations, from which polling clients receive only changes. Thread-safe.

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
ReasonsParameter = Annotated[
    str,
    Query(
        max_length=1_000,
        pattern=TEXT_PATTERN,
        description="Only jobs that wait for one of these reason codes, separated by commas. Empty: all.",
    ),
]
GpuParameter = Annotated[
    str,
    Query(
        max_length=300,
        pattern=TEXT_PATTERN,
        description="Only jobs that may run on this GPU model: those that require it, or no model. Empty: all.",
    ),
]
QueueParameter = Annotated[
    str, Query(max_length=300, pattern=TEXT_PATTERN, description="Only jobs of this queue. Empty: all.")
]
GenerationParameter = Annotated[
    int | None,
    Query(ge=0, lt=2**63, description="Number from an earlier response. Only nodes that changed since are listed."),
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
    context: ContextDep,
    request: Request,
    *,
    limit: Annotated[int, Query(ge=1, le=100, description="Most jobs to list, 1 to 100.")] = WAITING_JOBS_DEFAULT,
    reason: ReasonsParameter = "",
    gpu: GpuParameter = "",
    queue: QueueParameter = "",
) -> WaitingView:
    """List the jobs that have waited longest, each with its reason, and the number of all pending jobs per reason: of
    all queues, or of one. The state may be slightly older than the newest."""
    wanted_codes = _parse_reason_codes(reason)
    cache = request.app.state.pending_reasons
    assert isinstance(cache, PendingReasonCache)
    pending, visibility = cache.read(context.committed), context.visibility
    waiting = [
        job
        for job in pending.snapshot.jobs.values()
        if _is_waiting(job)
        and queue in ("", job.spec.queue)
        and (visibility.is_unrestricted or visibility.can_see_job(job))
    ]
    codes = {job.id: pending.reasons[job.id].code for job in waiting if job.id in pending.reasons}
    matching = (
        job
        for job in waiting
        if (not wanted_codes or codes.get(job.id) in wanted_codes) and (not gpu or job.spec.gpu in ("", gpu))
    )
    longest = nsmallest(limit, matching, key=get_job_sort_key)
    items = [waiting_job_view(job, pending.explain(job.id)) for job in longest]
    reasons = Counter(code.value for code in codes.values())
    view: WaitingView = {
        "generation": pending.snapshot.generation,
        "as_of_s": pending.snapshot.now_s,
        "reasons": dict(reasons),
        "items": items,
    }
    return context.redact(view)


def _parse_reason_codes(text: str) -> frozenset[ReasonCode]:
    """Return the reason codes that a comma-separated list names; none if it is empty."""
    names = [name.strip() for name in text.split(",")] if text else []
    known = {code.value: code for code in ReasonCode}
    for name in names:
        if name not in known:
            raise_invalid_field("reason", name, f"one or more of {', '.join(known)}{suggest(name, known)}")
    return frozenset(known[name] for name in names)


def _is_waiting(job: Job) -> bool:
    return job.state in WAITING_STATES and job.intent is Intent.RUN


def _pool_summaries(snapshot: Snapshot) -> list[PoolSummaryView]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for node in snapshot.nodes.values():
        sizes[node.pool].append(node.gpus)
    return [pool_summary_view(pool, snapshot, sizes[name]) for name, pool in sorted(snapshot.pools.items())]
