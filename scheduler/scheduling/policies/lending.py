"""Policies for the number of a pool's nodes that may be on loan now."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.fleet import UNRECALLED_LOAN_STATES, DemandReading, Loan, NodeState, Pool, get_shortages
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
    """The number of loans that a pool can bear.

    `allows_new_loans` permits new loans up to `lasting_nodes`, which the pool can bear for the shortest duration of a
    loan.
    """

    nodes: int
    allows_new_loans: bool
    reason: Reason
    lasting_nodes: int = 0


def lend_nothing(snapshot: Snapshot, pool: Pool, settings: PolicySettings) -> LendingTarget:
    """Lend nothing: nodes that are still on loan are returned."""
    return LendingTarget(0, False, Reason(ReasonCode.OPERATOR_ASKED, "this policy set does not lend"))


def lend_forecast_idle(snapshot: Snapshot, pool: Pool, settings: PolicySettings) -> LendingTarget:
    """Lend whole nodes that inference will not need within the time it takes to recall them and serve again.

    floor((capacity - max(observed, forecast quantile) - headroom) / node), as Lyra (EuroSys'23, section 4) does with
    its LSTM; the working quantile and the bounds of the pool's owner are additions. A cordoned node counts only with
    what inference has on it, because inference can add nothing there. Without a demand reading nothing is lent, unless
    the owner gave a demand profile. With a stale reading, or without both a calibrated forecast and a profile, there
    are no new loans. Once the reading is so old that demand counts as lost, all loans are recalled. A new loan must
    also fit the forecast demand over the shortest worthwhile loan. Running loans are not recalled for that.
    """
    rules = pool.lending
    reading = snapshot.demand.get(pool.name)
    if snapshot.switches.loans_recalled or not rules.enabled:
        return LendingTarget(0, False, Reason(ReasonCode.OPERATOR_ASKED, "lending is switched off"))
    forecast = snapshot.forecasts.get(pool.name)
    if reading is None and not (rules.demand_profile and forecast):
        return LendingTarget(
            0, False, Reason(ReasonCode.INFERENCE_NEEDS_NODE, f"pool {pool.name} has no demand reading")
        )
    age_s, stale_s = 0.0 if reading is None else snapshot.now_s - reading.at_s, find_demand_stale_s(pool, settings)
    if age_s >= rules.find_demand_lost_s(stale_s):
        detail = f"pool {pool.name} has had no demand reading for {age_s:.0f} s"
        return LendingTarget(0, False, Reason(ReasonCode.DEMAND_LOST, detail, {"age_s": age_s}))
    level = find_working_quantile(rules, get_shortages(snapshot.demand, pool.name))
    observed = 0.0 if reading is None else reading.gpus
    needed = max(observed, forecast.demand_at(level)) if forecast else observed
    stale = age_s > stale_s
    lasting = max(needed, forecast.min_loan_demand_at(level)) if forecast else needed
    nodes = _spare_nodes(snapshot, pool, needed)
    has_forecast = forecast is not None and (forecast.is_calibrated or bool(rules.demand_profile))
    is_closed = snapshot.switches.lending_paused or is_in_blackout(rules, snapshot.now_s)
    may_grow = has_forecast and not (stale or is_closed)
    horizon_s = forecast.horizon_s if forecast else rules.horizon_s
    numbers = {"capacity_gpus": float(snapshot.capacity(pool.name)), "observed_gpus": observed}
    numbers |= {"needed_gpus": needed, "lendable_nodes": float(nodes), "quantile": level}
    detail = (
        f"{pool.name} uses {observed:.2f} of {numbers['capacity_gpus']:.0f} GPUs and needs at most {needed:.2f} "
        f"within {horizon_s:.0f} s: it can lend {'1 node' if nodes == 1 else f'{nodes} nodes'}"
    )
    if forecast is not None and forecast.event:
        detail = f"{detail}; known event {forecast.event!r} raises the forecast"
    if closed := _count_closed_gpus(snapshot, pool):
        numbers["cordoned_gpus"] = float(sum(closed))
        detail = f"{detail}; {sum(closed)} GPUs are on cordoned nodes"
    reason = Reason(ReasonCode.INFERENCE_IDLE, detail, numbers)
    return LendingTarget(nodes, may_grow, reason, lasting_nodes=_spare_nodes(snapshot, pool, lasting))


def find_demand_stale_s(pool: Pool, settings: PolicySettings) -> float:
    """Return the age at which a demand reading of the pool permits no new loan."""
    own_s = pool.lending.demand_stale_s
    return settings.demand_stale_s if own_s is None else own_s


def demand_lost_at_s(pool: Pool, reading: DemandReading | None, settings: PolicySettings) -> float:
    """Return when the pool's demand counts as lost if no reading arrives until then. Infinite without a reading."""
    if reading is None:
        return float("inf")
    return reading.at_s + pool.lending.find_demand_lost_s(find_demand_stale_s(pool, settings))


def count_wanted_gpus(snapshot: Snapshot, gpu: str, settings: PolicySettings, *, scales: bool, mixes: bool) -> float:
    """Return how many more GPUs of a model, lent or free, jobs could use beyond those that are free or offered.

    This is the demand of pending jobs, and of running jobs below their maximum if the policy set `scales`. A running
    job can use GPUs of another model if the policy set `mixes` models and a solved or promising plan gains from them.
    If any job can use the model, and training owns nodes of it, a reserve for future jobs is added. Other nodes are not
    lent, because inference would drain them for nothing.
    """
    index, quota = snapshot.index, QuotaState(snapshot)
    wanting = (*index.waiting, *(index.below_maximum if scales else ()))
    wished = sum(
        min(_count_wished_gpus(snapshot, job, gpu, settings, scales=scales, mixes=mixes), quota.headroom(job))
        for job in map(snapshot.jobs.__getitem__, wanting)
        if job.accepts_lent_nodes and job.spec.gpu in ("", gpu)
    )
    if wished <= 0:
        return 0.0
    offered = sum(node.gpus for name in index.offered if (node := snapshot.nodes[name]).gpu == gpu)
    free = sum(gpus for (model, _), gpus in index.free_gpus.items() if model == gpu)
    owned, lent = (index.training_gpus.get((gpu, is_lent), 0) for is_lent in (False, True))
    return wished + settings.lending_reserve * (owned + lent if owned else 0) - free - offered


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


def _spare_nodes(snapshot: Snapshot, pool: Pool, needed_gpus: float) -> int:
    rules = pool.lending
    up, closed = dict(snapshot.index.count_up_nodes_by_size(pool.name)), _count_closed_gpus(snapshot, pool)
    spare_gpus = (snapshot.capacity(pool.name) - sum(closed)) * (1.0 - rules.headroom) - needed_gpus
    nodes = floor(max(0.0, spare_gpus) / max(up, default=1))
    kept = max(rules.kept_nodes_min, _count_withheld_nodes(snapshot, pool))
    bounds = [sum(up.values()) - len(closed) - kept, nodes]
    if rules.lent_nodes_max is not None:
        bounds.append(rules.lent_nodes_max)
    return max(0, min(bounds))


def _count_withheld_nodes(snapshot: Snapshot, pool: Pool) -> int:
    """Return the number of the pool's nodes that are up and open, but that its owner does not lend."""
    withheld = (snapshot.nodes[name] for name in snapshot.index.withheld)
    return sum(1 for node in withheld if node.pool == pool.name and node.state is NodeState.UP and not node.cordoned)


def _count_closed_gpus(snapshot: Snapshot, pool: Pool) -> list[int]:
    """Return the GPUs that inference cannot use on each of the pool's cordoned nodes, if any.

    Lent nodes are left out.
    """
    nodes, loans, closed = snapshot.nodes, snapshot.loans, list[int]()
    for name in sorted(snapshot.index.cordoned):
        node, loan = nodes[name], loans.get(name)
        if (
            node.pool == pool.name
            and node.state is NodeState.UP
            and not (loan and loan.state in UNRECALLED_LOAN_STATES)
        ):
            closed.append(node.unschedulable_gpus)
    return [gpus for gpus in closed if gpus > 0]
