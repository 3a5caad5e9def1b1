"""Pools, nodes and demand as answers."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from api.answers.loan import LoanView, loan_view
from api.answers.page import AtSeconds
from scheduler.domain.codec import encode
from scheduler.domain.fleet import DemandReading, Node, NodeState, Pool, PoolKind
from scheduler.domain.forecast import Forecast
from scheduler.domain.snapshot import Snapshot


class BlackoutView(TypedDict):
    """Seconds of the UTC day."""

    start_s: float
    end_s: float


class LendingPolicyView(TypedDict):
    """What the pool's owner allows; see the request's schema."""

    enabled: bool
    quantile: float
    headroom: float
    return_deadline_s: float
    cold_start_s: float
    kept_nodes_min: int
    lent_nodes_max: int | None
    loan_s_min: float
    blackouts: list[BlackoutView]
    demand_stale_s: float | None


class DemandView(TypedDict):
    """`asked_gpus` is what was told, `gpus` the same cut to the pool's capacity."""

    at_s: AtSeconds
    gpus: float
    asked_gpus: float
    clamped: bool


class PoolDemandView(DemandView):
    pool: str
    capacity_gpus: int


class DemandHistoryView(TypedDict):
    pool: str
    capacity_gpus: int
    latest: DemandView | None
    readings: list[DemandView]


class ForecastView(TypedDict):
    """`gpus[i]`: the most that the pool needs within `horizon_s`, with probability `quantiles[i]`. `lasting_gpus` are
    the same over the shortest loan that is worth making, empty where the horizon covers it."""

    made_at_s: AtSeconds
    horizon_s: float
    quantiles: list[float]
    gpus: list[float]
    method: str
    lasting_gpus: list[float]


class PoolForecastView(TypedDict):
    """`forecast` is null while there are too few readings for one."""

    pool: str
    forecast: ForecastView | None


class PoolView(TypedDict):
    """`capacity_gpus` leaves out nodes that are down. `lending`, `lent_nodes` and `demand` are those of an inference
    pool."""

    name: str
    kind: PoolKind
    nodes: int
    gpus: int
    capacity_gpus: int
    lending: NotRequired[LendingPolicyView]
    lent_nodes: NotRequired[int]
    demand: NotRequired[DemandView | None]


class NodeView(TypedDict):
    """`jobs` are the GPUs in use by job id, those being left included. `inference_gpus` are used by inference,
    `other_gpus` by others that are neither inference nor jobs."""

    name: str
    pool: str
    gpu: str
    gpus: int
    gpu_memory_bytes: int
    state: NodeState
    cordoned: bool
    draining: bool
    inference_gpus: int
    other_gpus: int
    serves_training: bool
    loan: LoanView | None
    jobs: dict[str, list[int]]


def pool_view(pool: Pool, snapshot: Snapshot) -> PoolView:
    nodes = [node for node in snapshot.nodes.values() if node.pool == pool.name]
    view: PoolView = {
        "name": pool.name,
        "kind": pool.kind,
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "capacity_gpus": snapshot.capacity(pool.name),
    }
    if pool.kind is PoolKind.INFERENCE:
        reading = snapshot.demand.get(pool.name)
        view["lending"] = encode(pool.lending)
        view["lent_nodes"] = sum(1 for node in nodes if snapshot.is_lent(node))
        view["demand"] = demand_view(reading) if reading else None
    return view


def demand_view(reading: DemandReading) -> DemandView:
    return {
        "at_s": reading.at_s,
        "gpus": reading.gpus,
        "asked_gpus": reading.asked_gpus,
        "clamped": reading.asked_gpus > reading.gpus,
    }


def forecast_view(forecast: Forecast) -> ForecastView:
    view: ForecastView = encode(forecast)
    return view


def node_view(node: Node, snapshot: Snapshot) -> NodeView:
    loan = snapshot.loans.get(node.name)
    held = {job.id: job.allocation.held.get(node.name) for job in snapshot.jobs.values()}
    return {
        "name": node.name,
        "pool": node.pool,
        "gpu": node.gpu,
        "gpus": node.gpus,
        "gpu_memory_bytes": node.gpu_memory_bytes,
        "state": node.state,
        "cordoned": node.cordoned,
        "draining": node.draining,
        "inference_gpus": node.inference_gpus,
        "other_gpus": node.other_gpus,
        "serves_training": snapshot.serves_training(node),
        "loan": loan_view(loan) if loan else None,
        "jobs": {job_id: list(indices) for job_id, indices in held.items() if indices},
    }
