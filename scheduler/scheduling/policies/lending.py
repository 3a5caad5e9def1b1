"""Policies for the number of a pool's nodes that may be on loan now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import floor

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.fleet import DemandReading, Loan, NodeState, Pool, get_shortages
from scheduler.domain.gpu_sets import format_gpu_count
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.blackouts import is_in_blackout
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.scheduling.policies.model_mix import count_gainful_gpus
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import accepts_model, can_run_on, gpu_model, node_sizes


@dataclass(frozen=True, slots=True)
class LendingTarget:
    """The loans that a pool can bear: at most `nodes`, with at most `gpus` GPUs together.

    `allows_new_loans` permits new loans up to `lasting_nodes` and `lasting_gpus`, which the pool can bear for the
    shortest duration of a loan.
    """

    nodes: int
    allows_new_loans: bool
    reason: Reason
    lasting_nodes: int = 0
    gpus: int = 0
    lasting_gpus: int = 0


def lend_nothing(snapshot: Snapshot, pool: Pool, settings: PolicySettings) -> LendingTarget:
    """Lend nothing: nodes that are still on loan are returned."""
    return LendingTarget(0, False, Reason(ReasonCode.OPERATOR_ASKED, "this policy set does not lend"))


class LendingBlock(StrEnum):
    """Why a pool makes no new loan, whatever it can spare. In the order in which they are explained."""

    SWITCHED_OFF = "SwitchedOff"
    LOANS_RECALLED = "LoansRecalled"
    NO_DEMAND = "NoDemand"
    DEMAND_LOST = "DemandLost"
    PAUSED = "LendingPaused"
    STALE_DEMAND = "StaleDemand"
    NO_FORECAST = "NoForecast"
    NOT_CALIBRATED = "ForecastNotCalibrated"
    BLACKOUT = "Blackout"


class LendingBound(StrEnum):
    """Limit of the number of loans that a pool can bear."""

    MAXIMUM = "MaximumReached"
    KEPT_NODES = "KeptNodes"
    DEMAND = "DemandTooHigh"


@dataclass(frozen=True, slots=True)
class LendingAssessment:
    """Loans that a pool can bear now, and the numbers that decide it. The target of loans and the explanation share it.

    Attributes:
        observed_gpus: demand, None without a reading; it is `demand_age_s` old and stale after `stale_after_s`.
        quantile: level of the forecast that must stay covered.
        forecast_gpus: forecast demand at that level within the horizon, None without a forecast.
        needed_gpus: the larger of both, 0 without a reading.
        headroom_gpus: GPUs that the policy keeps free in addition.
        cordoned_gpus: GPUs that inference cannot use on cordoned nodes.
        nodes: loans that the pool can bear now. `bound` limits them.
        gpus: GPUs that loans may take together now.
        lasting_nodes, lasting_gpus: the same for the shortest worthwhile loan. New loans keep to it.
        has_partial_nodes: whether loans of some nodes take only some of their GPUs.
        blocks: why no new loan is made, whatever `nodes` is.
        horizon_s: time over which the forecast looks ahead, in seconds.
        event: name of the known event that raises the forecast, empty without one.
    """

    capacity_gpus: int
    observed_gpus: float | None
    demand_age_s: float | None
    stale_after_s: float
    quantile: float
    forecast_gpus: float | None
    needed_gpus: float
    headroom_gpus: float
    cordoned_gpus: int
    nodes: int
    gpus: int
    lasting_nodes: int
    lasting_gpus: int
    has_partial_nodes: bool
    bound: LendingBound
    blocks: tuple[LendingBlock, ...]
    horizon_s: float
    event: str

    @property
    def in_blackout(self) -> bool:
        return LendingBlock.BLACKOUT in self.blocks


def assess_lending(snapshot: Snapshot, pool: Pool, settings: PolicySettings) -> LendingAssessment:
    """Return what the pool can lend, as `lend_forecast_idle` decides."""
    rules, reading = pool.lending, snapshot.demand.get(pool.name)
    forecast = snapshot.forecasts.get(pool.name)
    level = find_working_quantile(rules, get_shortages(snapshot.demand, pool.name))
    observed_gpus = 0.0 if reading is None else reading.gpus
    needed = max(observed_gpus, forecast.demand_at(level)) if forecast else observed_gpus
    lasting = max(needed, forecast.min_loan_demand_at(level)) if forecast else needed
    capacity, closed = snapshot.capacity(pool.name), _count_closed_gpus(snapshot, pool)
    spare_gpus, lasting_gpus = (
        floor(max(0.0, (capacity - closed.gpus) * (1.0 - rules.headroom) - gpus)) for gpus in (needed, lasting)
    )
    nodes, bound = _count_spare_nodes(snapshot, pool, spare_gpus, closed)
    lasting_nodes, _ = _count_spare_nodes(snapshot, pool, lasting_gpus, closed)
    return LendingAssessment(
        capacity_gpus=capacity,
        observed_gpus=None if reading is None else reading.gpus,
        demand_age_s=None if reading is None else snapshot.now_s - reading.at_s,
        stale_after_s=find_demand_stale_s(pool, settings),
        quantile=level,
        forecast_gpus=forecast.demand_at(level) if forecast else None,
        needed_gpus=needed,
        headroom_gpus=(capacity - closed.gpus) * rules.headroom,
        cordoned_gpus=closed.gpus,
        nodes=nodes,
        gpus=spare_gpus,
        lasting_nodes=lasting_nodes,
        lasting_gpus=lasting_gpus,
        has_partial_nodes=any(size < gpus for gpus, size, _ in snapshot.index.count_up_nodes(pool.name)),
        bound=bound,
        blocks=tuple(_list_blocks(snapshot, pool, settings)),
        horizon_s=forecast.horizon_s if forecast else rules.horizon_s,
        event=forecast.event if forecast else "",
    )


def lend_forecast_idle(snapshot: Snapshot, pool: Pool, settings: PolicySettings) -> LendingTarget:
    """Lend GPUs that inference will not need within the time it takes to recall them and serve again.

    Loans may take capacity - max(observed, forecast quantile) - headroom GPUs together. Lyra (EuroSys'23, section 4)
    divides that by the size of a node, with an LSTM as forecast; the working quantile, the bounds of the pool's owner
    and loans of unlike sizes are additions. A cordoned node counts only with
    what inference has on it, because inference can add nothing there. Without a demand reading nothing is lent, unless
    the owner gave a demand profile. With a stale reading, or without both a calibrated forecast and a profile, there
    are no new loans. Once the reading is so old that demand counts as lost, all loans are recalled. A new loan must
    also fit the forecast demand over the shortest worthwhile loan. Running loans are not recalled for that.
    """
    found = assess_lending(snapshot, pool, settings)
    if not {LendingBlock.SWITCHED_OFF, LendingBlock.LOANS_RECALLED}.isdisjoint(found.blocks):
        return LendingTarget(0, False, Reason(ReasonCode.OPERATOR_ASKED, "lending is switched off"))
    if LendingBlock.NO_DEMAND in found.blocks:
        return LendingTarget(
            0, False, Reason(ReasonCode.INFERENCE_NEEDS_NODE, f"pool {pool.name} has no demand reading")
        )
    if LendingBlock.DEMAND_LOST in found.blocks:
        age_s = found.demand_age_s or 0.0
        detail = f"pool {pool.name} has had no demand reading for {age_s:.0f} s"
        return LendingTarget(0, False, Reason(ReasonCode.DEMAND_LOST, detail, {"age_s": age_s}))
    observed = found.observed_gpus or 0.0
    numbers = {"capacity_gpus": float(found.capacity_gpus), "observed_gpus": observed}
    numbers |= {"needed_gpus": found.needed_gpus, "lendable_nodes": float(found.nodes), "quantile": found.quantile}
    lendable = "1 node" if found.nodes == 1 else f"{found.nodes} nodes"
    if found.has_partial_nodes:
        numbers["lendable_gpus"] = float(found.gpus)
        lendable = f"{format_gpu_count(found.gpus)}, on at most {lendable}"
    detail = (
        f"{pool.name} uses {observed:.2f} of {found.capacity_gpus} GPUs and needs at most "
        f"{found.needed_gpus:.2f} within {found.horizon_s:.0f} s: it can lend {lendable}"
    )
    if found.event:
        detail = f"{detail}; known event {found.event!r} raises the forecast"
    if found.cordoned_gpus:
        numbers["cordoned_gpus"] = float(found.cordoned_gpus)
        detail = f"{detail}; {found.cordoned_gpus} GPUs are on cordoned nodes"
    reason = Reason(ReasonCode.INFERENCE_IDLE, detail, numbers)
    return LendingTarget(
        found.nodes, not found.blocks, reason, found.lasting_nodes, gpus=found.gpus, lasting_gpus=found.lasting_gpus
    )


def _list_blocks(snapshot: Snapshot, pool: Pool, settings: PolicySettings) -> Iterator[LendingBlock]:
    rules, switches, reading = pool.lending, snapshot.switches, snapshot.demand.get(pool.name)
    forecast = snapshot.forecasts.get(pool.name)
    stale_s = find_demand_stale_s(pool, settings)
    age_s = 0.0 if reading is None else snapshot.now_s - reading.at_s
    if not rules.enabled:
        yield LendingBlock.SWITCHED_OFF
    if switches.loans_recalled:
        yield LendingBlock.LOANS_RECALLED
    if reading is None and not (rules.demand_profile and forecast):
        yield LendingBlock.NO_DEMAND
    if age_s >= rules.find_demand_lost_s(stale_s):
        yield LendingBlock.DEMAND_LOST
    if switches.lending_paused:
        yield LendingBlock.PAUSED
    if age_s > stale_s:
        yield LendingBlock.STALE_DEMAND
    if forecast is None:
        yield LendingBlock.NO_FORECAST
    elif not (forecast.is_calibrated or rules.demand_profile):
        yield LendingBlock.NOT_CALIBRATED
    if is_in_blackout(rules, snapshot.now_s):
        yield LendingBlock.BLACKOUT


def find_demand_stale_s(pool: Pool, settings: PolicySettings) -> float:
    """Return the age at which a demand reading of the pool permits no new loan."""
    own_s = pool.lending.demand_stale_s
    return settings.demand_stale_s if own_s is None else own_s


def demand_lost_at_s(pool: Pool, reading: DemandReading | None, settings: PolicySettings) -> float:
    """Return when the pool's demand counts as lost if no reading arrives until then. Infinite without a reading."""
    if reading is None:
        return float("inf")
    return reading.at_s + pool.lending.find_demand_lost_s(find_demand_stale_s(pool, settings))


def count_wanted_gpus(
    snapshot: Snapshot,
    gpu: str,
    settings: PolicySettings,
    *,
    scales: bool,
    mixes: bool,
    counts_proposed: bool = True,
) -> float:
    """Return how many more GPUs of a model, lent or free, jobs could use beyond those that are free or coming.

    Offered nodes are coming, and proposed ones unless `counts_proposed` is False. To what jobs wish for, a reserve for
    future jobs is added if training owns nodes of the model. If no job wishes for it, nothing is wanted, because
    inference would drain nodes for nothing.
    """
    index = snapshot.index
    wished = sum(list_wished_gpus(snapshot, gpu, settings, scales=scales, mixes=mixes).values())
    if wished <= 0:
        return 0.0
    coming = index.offered | (index.proposed if counts_proposed else set())
    loans = ((snapshot.loans[name], snapshot.nodes[name]) for name in coming)
    offered = sum(loan.count_gpus(node) for loan, node in loans if node.gpu == gpu)
    free = sum(gpus for (model, _), gpus in index.free_gpus.items() if model == gpu)
    owned, lent = (index.training_gpus.get((gpu, is_lent), 0) for is_lent in (False, True))
    return wished + settings.lending_reserve * (owned + lent if owned else 0) - free - offered


def list_wished_gpus(
    snapshot: Snapshot, gpu: str, settings: PolicySettings, *, scales: bool, mixes: bool
) -> dict[str, int]:
    """Return how many more GPUs of a model each job could use, for those that could use any.

    These are pending jobs, and running jobs below their maximum if the policy set `scales`. A running job can use GPUs
    of another model if the policy set `mixes` models and a solved or promising plan gains from them.
    """
    index, quota = snapshot.index, QuotaState(snapshot)
    wishes: dict[str, int] = {}
    for job in map(snapshot.jobs.__getitem__, (*index.waiting, *(index.below_maximum if scales else ()))):
        if job.accepts_lent_nodes and job.spec.gpu in ("", gpu):
            wished = _count_wished_gpus(snapshot, job, gpu, settings, scales=scales, mixes=mixes)
            wishes[job.id] = min(wished, quota.headroom(job))
    return {job_id: wished for job_id, wished in wishes.items() if wished}


def _count_wished_gpus(
    snapshot: Snapshot, job: Job, gpu: str, settings: PolicySettings, *, scales: bool, mixes: bool
) -> int:
    held = job.allocation.target_gpus
    if held and gpu_model(snapshot, job, node_sizes(snapshot)) != gpu:
        return count_gainful_gpus(snapshot, job, gpu, settings) if mixes else 0
    if not held and not (can_run_on(snapshot, job, gpu, node_sizes(snapshot)) and accepts_model(snapshot, job, gpu)):
        return 0
    return (job.spec.max_gpus if scales else job.spec.min_gpus) - held


def is_unused_too_long(loan: Loan, pool: Pool, settings: PolicySettings, now_s: float) -> bool:
    """Return whether no job has used the node for so long that it goes back."""
    return now_s >= unused_loan_ends_s(loan, pool, settings)


def unused_loan_ends_s(loan: Loan, pool: Pool, settings: PolicySettings) -> float:
    """Return when a lent node that nobody uses goes back: after the minimum duration of a loan, and two full passes.

    Jobs grow in full passes only, so each has had the chance to use the node by then. Infinite for a node in use.
    """
    if loan.unused_since_s is None:
        return float("inf")
    return loan.unused_since_s + max(pool.lending.loan_s_min, 2 * settings.full_pass_period_s)


@dataclass(frozen=True, slots=True)
class _ClosedGpus:
    """GPUs that inference cannot use on cordoned nodes, and the number of such nodes that are not on loan."""

    nodes: int
    gpus: int


def _count_spare_nodes(
    snapshot: Snapshot, pool: Pool, spare_gpus: int, closed: _ClosedGpus
) -> tuple[int, LendingBound]:
    """Return how many nodes the pool can lend if loans may take `spare_gpus` together, and what limits them."""
    rules, up = pool.lending, snapshot.index.count_up_nodes(pool.name)
    total = sum(nodes for _, _, nodes in up)
    kept = max(rules.kept_nodes_min, _count_withheld_nodes(snapshot, pool))
    affordable = 0
    for _, loan_gpus, nodes in sorted(up, key=lambda size: size[1]):
        taken = min(nodes, spare_gpus // loan_gpus)
        affordable, spare_gpus = affordable + taken, spare_gpus - taken * loan_gpus
    bounds = {LendingBound.KEPT_NODES: total - closed.nodes - kept, LendingBound.DEMAND: affordable}
    if rules.lent_nodes_max is not None:
        bounds[LendingBound.MAXIMUM] = rules.lent_nodes_max
    bound = min(bounds, key=bounds.__getitem__)
    return max(0, bounds[bound]), bound


def _count_withheld_nodes(snapshot: Snapshot, pool: Pool) -> int:
    """Return the number of the pool's nodes that are up and open, but that its owner does not lend."""
    withheld = (snapshot.nodes[name] for name in snapshot.index.withheld)
    return sum(1 for node in withheld if node.pool == pool.name and node.state is NodeState.UP and not node.cordoned)


def _count_closed_gpus(snapshot: Snapshot, pool: Pool) -> _ClosedGpus:
    """Return the GPUs that inference cannot use on the pool's cordoned nodes. GPUs on loan are left out."""
    loans, closed_nodes, closed_gpus = snapshot.loans, 0, 0
    for name in snapshot.index.cordoned:
        node, loan = snapshot.nodes[name], loans.get(name)
        if node.pool != pool.name or node.state is not NodeState.UP:
            continue
        on_loan = loan.count_gpus(node) if loan is not None and loan.is_unrecalled else 0
        unusable = max(0, node.unschedulable_gpus - on_loan)
        closed_nodes += unusable > 0 and not on_loan
        closed_gpus += unusable
    return _ClosedGpus(closed_nodes, closed_gpus)
