"""Views of pools and nodes: lending policies, demand, forecasts and shortages."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from api.identity.principals import Principal
from api.loans import LoanView, find_open_receipt, loan_view
from api.pool_calendar import BlackoutView, KnownEventView
from api.pool_explanations import ShadowView, shadow_view
from api.serving_views import ServedModelView, served_model_views
from api.standby_views import PrefetchPolicyView, PrefetchResultView, StandbyStateView, StandbyView
from scheduler.documents.demand_source import (
    DemandQueryDocument,
    DemandSourceDocument,
    RequestQueryDocument,
    to_source_document,
)
from scheduler.documents.fleet import LendingDocument, PoolNetworkDocument
from scheduler.domain.codec import encode
from scheduler.domain.demand_source import DemandUnit, InferenceServer, PrometheusDemand
from scheduler.domain.fleet import (
    DemandReading,
    Forecast,
    IncidentKind,
    Node,
    NodeIncident,
    NodeState,
    Pool,
    PoolKind,
    get_shortages,
)
from scheduler.domain.lending_policy import LendingMode, LendingPolicy
from scheduler.domain.shortages import ShortageRecord
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.scheduling.policies.way_back import measure_way_back
from scheduler.solver.profiles.catalog import is_estimated_gpu

_NETWORK = {name: info.description for name, info in PoolNetworkDocument.model_fields.items()}
_QUERY = {name: info.description for name, info in DemandQueryDocument.model_fields.items()}
_REQUEST_QUERY = {name: info.description for name, info in RequestQueryDocument.model_fields.items()}
_SOURCE = {name: info.description for name, info in DemandSourceDocument.model_fields.items()}
_LENDING = {name: info.description for name, info in LendingDocument.model_fields.items()}


class LendingPolicyView(TypedDict):
    """Limits that the owner of an inference pool sets for its loans."""

    enabled: Annotated[bool, Field(description=_LENDING["enabled"])]
    shortage_target: Annotated[
        float | None,
        Field(description="Promised share of five-minute intervals in which loans leave it short. Null: none."),
    ]
    quantile: Annotated[
        float,
        Field(
            description="Quantile of the demand forecast that nodes that are not lent must cover, between 0 and 1. It "
            "changes with the shortages if there is a `shortage_target`."
        ),
    ]
    headroom: Annotated[float, Field(description=_LENDING["headroom"])]
    return_deadline_s: Annotated[float, Field(description=_LENDING["return_deadline_s"])]
    cold_start_s: Annotated[float, Field(description=_LENDING["cold_start_s"])]
    kept_nodes_min: Annotated[int, Field(description=_LENDING["kept_nodes_min"])]
    lent_nodes_max: Annotated[int | None, Field(description=_LENDING["lent_nodes_max"])]
    loan_s_min: Annotated[float, Field(description=_LENDING["loan_s_min"])]
    blackouts: Annotated[list[BlackoutView], Field(description=_LENDING["blackouts"])]
    demand_stale_s: Annotated[float | None, Field(description=_LENDING["demand_stale_s"])]
    time_zone: Annotated[str, Field(description=_LENDING["time_zone"])]
    known_events: Annotated[list[KnownEventView], Field(description="Times of unusual demand.")]
    demand_profile: Annotated[list[float], Field(description=_LENDING["demand_profile"])]
    demand_lost_s: Annotated[float | None, Field(description=_LENDING["demand_lost_s"])]
    mode: Annotated[LendingMode, Field(description=_LENDING["mode"])]
    notice_s: Annotated[float, Field(description=_LENDING["notice_s"])]
    veto_s: Annotated[float, Field(description=_LENDING["veto_s"])]
    standby: Annotated[StandbyView | None, Field(description=_LENDING["standby"])]
    prefetch: Annotated[PrefetchPolicyView | None, Field(description=_LENDING["prefetch"])]


class DemandView(TypedDict):
    """A reading of what the inference of a pool needs."""

    at_s: Annotated[float, Field(description="Time of the reading, in seconds since 1970 (UTC).")]
    gpus: Annotated[float, Field(description="Number of GPUs needed, limited to the pool's capacity.")]
    asked_gpus: Annotated[float, Field(description="Number of GPUs as reported, without the limit.")]
    clamped: Annotated[bool, Field(description="Whether the reported number exceeded the capacity.")]


class DemandHistoryView(TypedDict):
    pool: Annotated[str, Field(description="Name of the inference pool.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]
    latest: Annotated[DemandView | None, Field(description="Newest reading. Null: none yet.")]
    readings: Annotated[list[DemandView], Field(description="Recorded readings of the requested time, oldest first.")]


class ModelRateView(TypedDict):
    """Predicted request rate of a model that is sized."""

    model: Annotated[str, Field(description="One of those that the pool serves.")]
    made_at_s: Annotated[float, Field(description="Time at which it was computed, in seconds since 1970 (UTC).")]
    horizon_s: Annotated[float, Field(description="Seconds that it looks ahead: the start of a replica.")]
    quantile: Annotated[float, Field(description="Probability that the rate stays at or below it.")]
    rate_per_s: Annotated[float, Field(description="Largest rate within the horizon, in requests/s.")]
    is_calibrated: Annotated[
        bool, Field(description="Whether enough forecasts have met their outcome. Otherwise it does not count.")
    ]


class ForecastView(TypedDict):
    """Predicted GPU demand of an inference pool."""

    made_at_s: Annotated[float, Field(description="Time at which it was computed, in seconds since 1970 (UTC).")]
    horizon_s: Annotated[
        float, Field(description="Seconds that it looks ahead: the way back of the pool's nodes, in round numbers.")
    ]
    quantiles: Annotated[list[float], Field(description="Probabilities, ascending, between 0 and 1.")]
    gpus: Annotated[
        list[float], Field(description="Most GPUs needed within the horizon, one number for each of `quantiles`.")
    ]
    method: Annotated[str, Field(description="How it was computed, as text for people.")]
    lasting_gpus: Annotated[
        list[float],
        Field(description="Most GPUs needed over the shortest worthwhile loan. Empty: the horizon covers it."),
    ]
    is_calibrated: Annotated[
        bool,
        Field(
            description="Whether enough forecasts have met their outcome. Otherwise nothing new is lent, unless the "
            "pool has a demand profile."
        ),
    ]
    event: Annotated[str, Field(description="Known event that raises the forecast. Empty: none.")]
    rates: Annotated[list[ModelRateView], Field(description="Predicted request rates of the models that are sized.")]


class ShortagesView(TypedDict):
    """Five-minute intervals of the last four weeks in which loans left the inference of a pool short."""

    intervals: Annotated[int, Field(description="Number of intervals that have closed.")]
    short_intervals: Annotated[int, Field(description="Number of them that were short.")]
    target: Annotated[float | None, Field(description="Promised share of short intervals. Null: a quantile is fixed.")]
    budget_left: Annotated[
        float | None,
        Field(description="Share of the promised short intervals that is left, 0 to 1. Null: a quantile is fixed."),
    ]


class PoolForecastView(TypedDict):
    """`forecast` is null while there are too few readings."""

    pool: Annotated[str, Field(description="Name of the inference pool.")]
    forecast: Annotated[ForecastView | None, Field(description="Predicted demand. Null: too few readings so far.")]


class PoolNetworkView(TypedDict):
    """The network between the nodes of a pool."""

    bandwidth_bytes_per_s: Annotated[float, Field(description=_NETWORK["bandwidth_bytes_per_s"])]
    latency_s: Annotated[float, Field(description=_NETWORK["latency_s"])]
    nics_per_node: Annotated[int, Field(description=_NETWORK["nics_per_node"])]


class WayBackView(TypedDict):
    """Time from the recall of a node until inference serves from it again, which one of 20 recalls exceeds."""

    leave_s: Annotated[float, Field(description="Seconds until training has left. Until measured: the deadline.")]
    start_s: Annotated[
        float,
        Field(
            description="Seconds until a replica of inference serves: it starts, or wakes in a pool with a standby. "
            "Until measured: the declared time."
        ),
    ]
    horizon_s: Annotated[float, Field(description="Seconds that forecasts look ahead: their sum, rounded up.")]


class DemandQueryView(TypedDict):
    """One summand of a pool's demand. Fields that are not set are left out."""

    promql: NotRequired[Annotated[str, Field(description=_QUERY["promql"])]]
    unit: NotRequired[Annotated[DemandUnit, Field(description=_QUERY["unit"])]]
    aggregate: NotRequired[Annotated[str, Field(description=_QUERY["aggregate"])]]
    preset: NotRequired[Annotated[InferenceServer, Field(description=_QUERY["preset"])]]
    selector: NotRequired[Annotated[dict[str, str], Field(description=_QUERY["selector"])]]
    requests_per_replica: NotRequired[Annotated[float, Field(description=_QUERY["requests_per_replica"])]]
    replicas_min: NotRequired[Annotated[int, Field(description=_QUERY["replicas_min"])]]
    gpus_per_replica: NotRequired[Annotated[float, Field(description=_QUERY["gpus_per_replica"])]]
    gpus_per_node: NotRequired[Annotated[float, Field(description=_QUERY["gpus_per_node"])]]


class RequestQueryView(TypedDict):
    """The requests for a model of the pool. Fields that are not set are left out."""

    model: Annotated[str, Field(description=_REQUEST_QUERY["model"])]
    preset: NotRequired[Annotated[InferenceServer, Field(description=_REQUEST_QUERY["preset"])]]
    selector: NotRequired[Annotated[dict[str, str], Field(description=_REQUEST_QUERY["selector"])]]
    window: NotRequired[Annotated[float, Field(description=_REQUEST_QUERY["window"])]]
    rate: NotRequired[Annotated[str, Field(description=_REQUEST_QUERY["rate"])]]
    prompt_lengths: NotRequired[Annotated[str, Field(description=_REQUEST_QUERY["prompt_lengths"])]]
    output_lengths: NotRequired[Annotated[str, Field(description=_REQUEST_QUERY["output_lengths"])]]
    correlation: Annotated[float, Field(description=_REQUEST_QUERY["correlation"])]
    burstiness: Annotated[float, Field(description=_REQUEST_QUERY["burstiness"])]
    replicas: NotRequired[Annotated[str, Field(description=_REQUEST_QUERY["replicas"])]]


class DemandSourceView(TypedDict):
    """Queries that the service polls for the demand of a pool."""

    queries: Annotated[
        list[DemandQueryView],
        Field(description="Summands. The demand is unknown while one of them is. Empty if it follows from `requests`."),
    ]
    requests: NotRequired[Annotated[list[RequestQueryView], Field(description=_SOURCE["requests"])]]
    stale_after_s: Annotated[float, Field(description=_SOURCE["stale_after_s"])]


class PoolView(TypedDict):
    """A pool of nodes. Only inference pools have `lending`, `lent_nodes`, `demand` and all after it."""

    name: Annotated[str, Field(description="Unique label chosen at creation.")]
    kind: Annotated[PoolKind, Field(description="Whether its nodes run training jobs or serve inference.")]
    nodes: Annotated[int, Field(description="Number of hosts, including those that are down.")]
    gpus: Annotated[int, Field(description="Number of GPUs of all its nodes.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]
    network: Annotated[
        PoolNetworkView | None,
        Field(description="Network between its nodes. Null: that of the profile of their GPU model."),
    ]
    lending: NotRequired[Annotated[LendingPolicyView, Field(description="Limits that the owner sets for its loans.")]]
    lent_nodes: NotRequired[Annotated[int, Field(description="Number of hosts on loan to training.")]]
    lent_gpus: NotRequired[Annotated[int, Field(description="Number of their GPUs that are on loan.")]]
    demand: NotRequired[
        Annotated[DemandView | None, Field(description="Latest reading of what inference needs. Null: none yet.")]
    ]
    way_back: NotRequired[Annotated[WayBackView, Field(description="How long a recalled node takes to serve again.")]]
    demand_source: NotRequired[
        Annotated[
            DemandSourceView | None,
            Field(description="Queries that the service polls for demand. Null: demand is reported to the API."),
        ]
    ]
    shadow: NotRequired[
        Annotated[ShadowView | None, Field(description="What it would have lent. Null: not in shadow mode.")]
    ]
    serving: NotRequired[
        Annotated[list[ServedModelView], Field(description="Models whose requests can be reported as demand.")]
    ]


class IncidentView(TypedDict):
    """A job that a node has failed or slowed."""

    kind: Annotated[
        IncidentKind,
        Field(
            description="`hang`: a rank made no progress. `loss`: its agent or a supervisor was lost. `straggler`: it "
            "computed more slowly than the other nodes of the job."
        ),
    ]
    job_id: Annotated[str, Field(description="Job whose run on the node failed or was slow.")]
    at_s: Annotated[float, Field(description="Time of the incident, in seconds since 1970 (UTC).")]
    confirmed: Annotated[
        bool, Field(description="Whether it counts toward a quarantine. A hang does once the job goes on elsewhere.")
    ]
    detail: Annotated[str, Field(description="Evidence, such as the rank and its last step.")]


class NodeView(TypedDict):
    """A host with GPUs of one model."""

    name: Annotated[str, Field(description="Host name, unique in the fleet.")]
    pool: Annotated[str, Field(description="Pool that owns it, lent or not.")]
    gpu: Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`.")]
    gpus: Annotated[int, Field(description="Number of GPUs that the host has.")]
    gpu_memory_bytes: Annotated[int, Field(description="Memory of one of them, in bytes.")]
    estimated: Annotated[bool, Field(description="Whether the GPU profile was estimated from what a machine reported.")]
    state: Annotated[NodeState, Field(description="`up`, or `down` if the executor no longer sees it.")]
    cordoned: Annotated[bool, Field(description="Whether nothing new is scheduled on it. Running jobs stay.")]
    draining: Annotated[bool, Field(description="Whether its jobs are moved away, too.")]
    quarantine: Annotated[
        str, Field(description="Why it is drained until `:uncordon` releases it. Empty: not quarantined.")
    ]
    incidents: Annotated[
        list[IncidentView], Field(description="Jobs that it has failed or slowed in the last day, oldest first.")
    ]
    lendable: Annotated[bool, Field(description="Whether it can be lent, if its pool serves inference.")]
    lendable_gpus: Annotated[
        list[int],
        Field(description="GPU indices that a loan takes while inference serves from the others. Empty: all GPUs."),
    ]
    standby: Annotated[StandbyStateView | None, Field(description="Its standby replicas. Null: its pool has none.")]
    prefetches: Annotated[
        list[PrefetchResultView], Field(description="Ended prefetches of images and weights whose pods still exist.")
    ]
    inference_gpus: Annotated[int, Field(description="Number of GPUs that inference uses, as last observed.")]
    other_gpus: Annotated[int, Field(description="Number of GPUs used by anything else outside Ebbtide.")]
    serves_training: Annotated[bool, Field(description="Whether jobs can start on it now.")]
    loan: Annotated[LoanView | None, Field(description="Its current loan to training. Null: not lent.")]
    jobs: Annotated[
        dict[str, list[int]],
        Field(description="GPU indices by id of the job that holds them, including GPUs being released."),
    ]


def pool_view(pool: Pool, snapshot: Snapshot) -> PoolView:
    nodes = [node for node in snapshot.nodes.values() if node.pool == pool.name]
    view: PoolView = {
        "name": pool.name,
        "kind": pool.kind,
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "capacity_gpus": snapshot.capacity(pool.name),
        "network": None if pool.network is None else encode(pool.network),
    }
    if pool.kind is PoolKind.INFERENCE:
        reading = snapshot.demand.get(pool.name)
        view["lending"] = _lending_view(pool.lending, get_shortages(snapshot.demand, pool.name))
        view["lent_nodes"] = sum(1 for node in nodes if snapshot.is_lent(node))
        view["lent_gpus"] = snapshot.index.lent_gpus.get(pool.name, 0)
        view["demand"] = demand_view(reading) if reading else None
        way = measure_way_back(snapshot, pool)
        view["way_back"] = {"leave_s": way.leave_s, "start_s": way.start_s, "horizon_s": way.horizon_s}
        view["demand_source"] = None if pool.demand is None else _source_view(pool.demand)
        view["shadow"] = shadow_view(pool, snapshot)
        view["serving"] = served_model_views(pool, reading)
    return view


def _source_view(source: PrometheusDemand) -> DemandSourceView:
    document = to_source_document(source)
    view: DemandSourceView = {"queries": document.get("queries", []), "stale_after_s": document["stale_after_s"]}
    if "requests" in document:
        view["requests"] = document["requests"]
    return view


def _lending_view(rules: LendingPolicy, record: ShortageRecord) -> LendingPolicyView:
    view: LendingPolicyView = encode(rules)
    view["quantile"] = find_working_quantile(rules, record)
    return view


def demand_view(reading: DemandReading) -> DemandView:
    return {
        "at_s": reading.at_s,
        "gpus": reading.gpus,
        "asked_gpus": reading.asked_gpus,
        "clamped": reading.asked_gpus > reading.gpus,
    }


def shortages_view(rules: LendingPolicy, record: ShortageRecord) -> ShortagesView:
    target = rules.shortage_target
    return {
        "intervals": record.intervals,
        "short_intervals": record.short_intervals,
        "target": target,
        "budget_left": None if target is None else record.compute_budget_left(target),
    }


def forecast_view(forecast: Forecast) -> ForecastView:
    view: ForecastView = encode(forecast)
    return view


def incident_view(incident: NodeIncident) -> IncidentView:
    return {
        "kind": incident.kind,
        "job_id": incident.job_id,
        "at_s": incident.at_s,
        "confirmed": incident.is_confirmed,
        "detail": incident.detail,
    }


def node_view(node: Node, snapshot: Snapshot, principal: Principal) -> NodeView:
    """Return the node as the principal may see it, except for the ids of jobs."""
    loan = snapshot.loans.get(node.name)
    held = {job.id: job.allocation.held.get(node.name) for job in snapshot.jobs.values()}
    return {
        "name": node.name,
        "pool": node.pool,
        "gpu": node.gpu,
        "gpus": node.gpus,
        "gpu_memory_bytes": node.gpu_memory_bytes,
        "estimated": is_estimated_gpu(node.gpu),
        "state": node.state,
        "cordoned": node.cordoned,
        "draining": node.draining,
        "quarantine": node.quarantine,
        "incidents": [incident_view(incident) for incident in node.incidents],
        "lendable": node.lendable,
        "lendable_gpus": list(node.lendable_gpus),
        "standby": None if node.standby is None else encode(node.standby),
        "prefetches": [encode(result) for result in node.prefetches],
        "inference_gpus": node.inference_gpus,
        "other_gpus": node.other_gpus,
        "serves_training": snapshot.serves_training(node),
        "loan": loan_view(loan, node, find_open_receipt(loan, snapshot), principal) if loan else None,
        "jobs": {job_id: list(indices) for job_id, indices in held.items() if indices},
    }
