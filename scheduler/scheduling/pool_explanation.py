"""Explain why an inference pool lends nothing, or nothing more, with numbers and what would change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scheduler.domain.fleet import LoanState, Node, NodeState, Pool, get_shortages
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.cycle import next_full_pass_s
from scheduler.scheduling.policies.lending import (
    LendingAssessment,
    LendingBlock,
    LendingBound,
    assess_lending,
    count_wanted_gpus,
    list_wished_gpus,
)
from scheduler.scheduling.policies.stage_policies import StagePolicies
from scheduler.scheduling.stages.lendable_nodes import is_lendable


class LendingObstacle(StrEnum):
    """Why a pool makes no new loan now. The codes of `LendingBlock` and `LendingBound` come on top of these."""

    POLICY_LENDS_NOTHING = "PolicyLendsNothing"
    SHADOW_MODE = "ShadowMode"
    BUDGET_SPENT = "ShortageBudgetSpent"
    LOAN_TOO_SHORT = "LoanTooShort"
    PROPOSALS_WAITING = "ProposalsWaiting"
    ALL_NODES_LENT = "AllNodesLent"
    NODES_VETOED = "NodesVetoed"
    NODES_CORDONED = "NodesCordoned"
    REPLICAS_CANNOT_SLEEP = "ReplicasCannotSleep"
    LENDABLE_GPUS_IN_USE = "LendableGpusInUse"
    NO_JOB_WANTS_GPUS = "NoJobWantsGpus"
    NEXT_FULL_PASS = "NextFullPass"


PoolReasonCode = LendingBlock | LendingBound | LendingObstacle


@dataclass(frozen=True, slots=True)
class WantedModel:
    """Jobs that could use more GPUs of a model, and the `gpus` that they lack beyond those free or coming."""

    jobs: int
    gpus: float


@dataclass(frozen=True, slots=True)
class PoolExplanation:
    """Why an inference pool lends nothing, or nothing more.

    Attributes:
        code: the first obstacle to a new loan.
        summary: the obstacle as one sentence.
        lever: what an operator or time can change about it.
        assessment: the numbers by which the policy decides.
        cordoned_nodes, vetoed_nodes: nodes that are up, not on loan, and cannot be lent for this reason.
        standby_blocked_nodes: nodes that are up, not on loan, and without a standby replica that can sleep.
        partly_used_nodes: nodes that are up, not on loan, and of which inference uses GPUs that a partial loan takes.
        lent_nodes: loans that are offered, active or recalled, of `lent_gpus` GPUs. `proposed_nodes` are proposals.
        wanted: what jobs could use, by GPU model of the pool's nodes.
        next_full_pass_at_s: when loans are considered next, in seconds since 1970 (UTC).
        budget_left: share of the promised short intervals that is left; None with a fixed quantile.
    """

    pool: str
    code: PoolReasonCode
    summary: str
    lever: str
    assessment: LendingAssessment
    cordoned_nodes: int
    vetoed_nodes: int
    standby_blocked_nodes: int
    partly_used_nodes: int
    lent_nodes: int
    lent_gpus: int
    proposed_nodes: int
    wanted: Mapping[str, WantedModel]
    next_full_pass_at_s: float
    budget_left: float | None


@dataclass(frozen=True, slots=True)
class _PoolView:
    """A pool with its snapshot and policies, and what its explanation needs of its nodes."""

    snapshot: Snapshot
    pool: Pool
    policies: StagePolicies
    assessment: LendingAssessment
    idle: tuple[Node, ...]
    lent_nodes: int
    lent_gpus: int
    live_gpus: int
    proposed_nodes: int

    @property
    def lendable(self) -> tuple[Node, ...]:
        return tuple(node for node in self.idle if is_lendable(node, self.snapshot.now_s))

    @property
    def cordoned_nodes(self) -> int:
        return sum(node.cordoned for node in self.idle)

    @property
    def vetoed_nodes(self) -> int:
        return sum(not node.cordoned and self.snapshot.now_s < node.vetoed_until_s for node in self.idle)

    @property
    def standby_obstacles(self) -> dict[str, str]:
        """Why nodes cannot be lent whose standby replicas cannot sleep, by node."""
        obstacles = {node.name: node.find_standby_obstacle(self.snapshot.now_s) for node in self.idle}
        return {name: obstacle for name, obstacle in sorted(obstacles.items()) if obstacle}

    @property
    def partly_used_nodes(self) -> int:
        return sum(bool(node.lendable_gpus and node.displaced_gpus) for node in self.idle)

    @property
    def has_room(self) -> bool:
        """Whether one more loan is bearable: by number, and by the GPUs of the smallest lendable node."""
        if self.lent_nodes + self.proposed_nodes >= self.assessment.lasting_nodes:
            return False
        smallest = min((node.loan_gpus for node in self.lendable), default=0)
        return self.live_gpus + smallest <= self.assessment.lasting_gpus

    @property
    def next_full_pass_at_s(self) -> float:
        due_s = next_full_pass_s(self.snapshot.full_pass_at_s, self.policies.settings.full_pass_period_s)
        return max(due_s, self.snapshot.now_s)

    @property
    def budget_left(self) -> float | None:
        target = self.pool.lending.shortage_target
        record = get_shortages(self.snapshot.demand, self.pool.name)
        return None if target is None else record.compute_budget_left(target)

    def count_wanted(self, gpu: str) -> WantedModel:
        policies = self.policies
        options = {"scales": policies.scales, "mixes": policies.deal_nodes is not None}
        wished = list_wished_gpus(self.snapshot, gpu, policies.settings, **options)
        gpus = count_wanted_gpus(self.snapshot, gpu, policies.settings, **options)
        return WantedModel(len(wished), max(0.0, gpus))


def explain_pool(snapshot: Snapshot, policies: StagePolicies, name: str) -> PoolExplanation:
    """Explain what keeps an inference pool from its next loan. The numbers are those of the lending policy.

    Raises:
        KeyError: The snapshot has no such pool.
    """
    pool = snapshot.pools[name]
    live = {node: loan for node, loan in snapshot.loans.items() if loan.pool == name and loan.is_live}
    proposed = sum(loan.state is LoanState.PROPOSED for loan in live.values())
    nodes = [node for node in snapshot.nodes.values() if node.pool == name]
    view = _PoolView(
        snapshot=snapshot,
        pool=pool,
        policies=policies,
        assessment=assess_lending(snapshot, pool, policies.settings),
        idle=tuple(node for node in nodes if node.state is NodeState.UP and node.name not in live),
        lent_nodes=len(live) - proposed,
        lent_gpus=sum(loan.count_gpus(snapshot.nodes[node]) for node, loan in live.items() if loan.is_in_effect),
        live_gpus=snapshot.index.live_loan_gpus.get(name, 0),
        proposed_nodes=proposed,
    )
    wanted = {gpu: view.count_wanted(gpu) for gpu in sorted({node.gpu for node in nodes})}
    code = _find_obstacle(view, wanted)
    return PoolExplanation(
        pool=name,
        code=code,
        summary=_summarize(view, code),
        lever=_LEVERS[code],
        assessment=view.assessment,
        cordoned_nodes=view.cordoned_nodes,
        vetoed_nodes=view.vetoed_nodes,
        standby_blocked_nodes=len(view.standby_obstacles),
        partly_used_nodes=view.partly_used_nodes,
        lent_nodes=view.lent_nodes,
        lent_gpus=view.lent_gpus,
        proposed_nodes=view.proposed_nodes,
        wanted=wanted,
        next_full_pass_at_s=view.next_full_pass_at_s,
        budget_left=view.budget_left,
    )


def _find_obstacle(view: _PoolView, wanted: Mapping[str, WantedModel]) -> PoolReasonCode:
    if not view.policies.lends:
        return LendingObstacle.POLICY_LENDS_NOTHING
    if view.assessment.blocks:
        return view.assessment.blocks[0]
    if view.pool.lending.is_shadow:
        return LendingObstacle.SHADOW_MODE
    if not view.has_room:
        return LendingObstacle.PROPOSALS_WAITING if view.proposed_nodes else _find_bound(view)
    if not view.lendable:
        return _find_missing_nodes(view)
    if not any(wanted[node.gpu].gpus > 0 for node in view.lendable):
        return LendingObstacle.PROPOSALS_WAITING if view.proposed_nodes else LendingObstacle.NO_JOB_WANTS_GPUS
    return LendingObstacle.NEXT_FULL_PASS


def _find_bound(view: _PoolView) -> PoolReasonCode:
    found = view.assessment
    if found.lasting_nodes < found.nodes and view.lent_nodes < found.nodes:
        return LendingObstacle.LOAN_TOO_SHORT
    is_short_of_gpus = view.lent_nodes + view.proposed_nodes < found.lasting_nodes
    if found.bound is LendingBound.DEMAND or is_short_of_gpus:
        return LendingObstacle.BUDGET_SPENT if view.budget_left == 0.0 else LendingBound.DEMAND
    if found.bound is LendingBound.KEPT_NODES and not view.pool.lending.kept_nodes_min:
        return _find_missing_nodes(view)
    return found.bound


def _find_missing_nodes(view: _PoolView) -> PoolReasonCode:
    if view.vetoed_nodes:
        return LendingObstacle.NODES_VETOED
    if view.standby_obstacles:
        return LendingObstacle.REPLICAS_CANNOT_SLEEP
    if view.cordoned_nodes:
        return LendingObstacle.NODES_CORDONED
    return LendingObstacle.LENDABLE_GPUS_IN_USE if view.partly_used_nodes else LendingObstacle.ALL_NODES_LENT


def _summarize(view: _PoolView, code: PoolReasonCode) -> str:
    name, found, rules = view.pool.name, view.assessment, view.pool.lending
    match code:
        case LendingBlock.PAUSED | LendingBlock.LOANS_RECALLED:
            return _describe_switch(view.snapshot)
        case LendingBlock.STALE_DEMAND | LendingBlock.DEMAND_LOST:
            return f"the demand reading is {found.demand_age_s:.0f} s old, and stale after {found.stale_after_s:.0f} s"
        case LendingObstacle.BUDGET_SPENT:
            return (
                f"pool {name} has used up its promise of short intervals, so the forecast at quantile "
                f"{found.quantile:g} must stay covered: {_describe_demand(found)}"
            )
        case LendingBound.DEMAND:
            return f"inference needs the nodes: {_describe_demand(found)}"
        case LendingObstacle.LOAN_TOO_SHORT:
            return (
                f"pool {name} can bear {found.nodes} loans now, but only {found.lasting_nodes} for "
                f"{rules.loan_s_min:.0f} s, the shortest worthwhile loan"
            )
        case LendingBound.MAXIMUM:
            return f"pool {name} has {view.lent_nodes} nodes on loan, and lent_nodes_max is {rules.lent_nodes_max}"
        case LendingBound.KEPT_NODES:
            return f"pool {name} has {view.lent_nodes} nodes on loan, and kept_nodes_min keeps {rules.kept_nodes_min}"
        case LendingObstacle.PROPOSALS_WAITING:
            return f"{view.proposed_nodes} proposed loans wait for the end of the notice of {rules.notice_s:.0f} s"
        case LendingObstacle.NODES_VETOED:
            return f"a veto protects {view.vetoed_nodes} of the nodes that are not on loan"
        case LendingObstacle.NODES_CORDONED:
            return f"{view.cordoned_nodes} of the nodes that are not on loan are cordoned"
        case LendingObstacle.REPLICAS_CANNOT_SLEEP:
            node, obstacle = next(iter(view.standby_obstacles.items()))
            nodes = f"{len(view.standby_obstacles)} of the nodes that are not on loan"
            return f"{nodes} have no replica that can be idle; {node}: {obstacle}"
        case LendingObstacle.LENDABLE_GPUS_IN_USE:
            return (
                f"inference uses lendable GPUs of {view.partly_used_nodes} of the nodes that are not on loan, and no "
                "pod is moved for a loan of a part of a node"
            )
        case LendingObstacle.NEXT_FULL_PASS:
            wait_s = view.next_full_pass_at_s - view.snapshot.now_s
            return f"new loans are made in full passes, and the next one is in {wait_s:.0f} s"
    return _SENTENCES[code].format(name=name)


def _describe_switch(snapshot: Snapshot) -> str:
    state = "lending is stopped and all loans are recalled" if snapshot.switches.loans_recalled else "lending is paused"
    if snapshot.lending_set_at_s is None:
        return state
    author, age_s = snapshot.lending_set_by or "an unnamed caller", snapshot.now_s - snapshot.lending_set_at_s
    return f"{state}; {author} set that {age_s:.0f} s ago"


def _describe_demand(found: LendingAssessment) -> str:
    forecast = "without a forecast" if found.forecast_gpus is None else f"forecast {found.forecast_gpus:.1f}"
    return (
        f"observed {found.observed_gpus or 0.0:.1f} GPUs, {forecast} at quantile {found.quantile:g}, headroom "
        f"{found.headroom_gpus:.1f}, of {found.capacity_gpus} GPUs with {found.cordoned_gpus} on cordoned nodes"
    )


_SENTENCES: dict[PoolReasonCode, str] = {
    LendingObstacle.POLICY_LENDS_NOTHING: "the policy set of this service lends nothing",
    LendingBlock.SWITCHED_OFF: "lending of pool {name} is switched off",
    LendingBlock.NO_DEMAND: "pool {name} has no demand reading",
    LendingBlock.NO_FORECAST: "pool {name} has too few demand readings for a forecast",
    LendingBlock.NOT_CALIBRATED: "the forecast of pool {name} is not calibrated yet",
    LendingBlock.BLACKOUT: "pool {name} is in a blackout",
    LendingObstacle.SHADOW_MODE: "pool {name} is in shadow mode, which records loans and makes none",
    LendingObstacle.ALL_NODES_LENT: "every node of pool {name} that is up is on loan",
    LendingObstacle.NO_JOB_WANTS_GPUS: "no job could use more GPUs of the models of pool {name}",
}

_LEVERS: dict[PoolReasonCode, str] = {
    LendingObstacle.POLICY_LENDS_NOTHING: "Set EBBTIDE_POLICY to a policy set that lends, such as ebbtide.",
    LendingBlock.SWITCHED_OFF: "Set lending.enabled to true.",
    LendingBlock.LOANS_RECALLED: "Run `ebbtide lending resume`.",
    LendingBlock.NO_DEMAND: "Report demand, or set the pool's demand source.",
    LendingBlock.DEMAND_LOST: "Restore the demand source, or raise lending.demand_lost_s.",
    LendingBlock.PAUSED: "Run `ebbtide lending resume`.",
    LendingBlock.STALE_DEMAND: "Restore the demand source, or raise lending.demand_stale_s.",
    LendingBlock.NO_FORECAST: "Wait for more demand readings.",
    LendingBlock.NOT_CALIBRATED: "Wait: calibration takes the first day of demand readings.",
    LendingBlock.BLACKOUT: "Wait for its end, or change lending.blackouts.",
    LendingObstacle.SHADOW_MODE: "Set lending.mode to lend once the record convinces you.",
    LendingBound.MAXIMUM: "Raise lending.lent_nodes_max.",
    LendingBound.KEPT_NODES: "Lower lending.kept_nodes_min.",
    LendingBound.DEMAND: "Wait for demand to fall, lower lending.headroom, or raise lending.shortage_target.",
    LendingObstacle.BUDGET_SPENT: "Wait until short intervals are four weeks old, or raise lending.shortage_target.",
    LendingObstacle.LOAN_TOO_SHORT: "Lower lending.loan_s_min.",
    LendingObstacle.PROPOSALS_WAITING: "Wait, or lower lending.notice_s.",
    LendingObstacle.ALL_NODES_LENT: "Add nodes to the pool.",
    LendingObstacle.NODES_VETOED: "Wait for the end of the veto, or lower lending.veto_s for later ones.",
    LendingObstacle.NODES_CORDONED: "Run `ebbtide uncordon` for nodes that work.",
    LendingObstacle.REPLICAS_CANNOT_SLEEP: "Correct the replicas or lending.standby. A failed node is tried again.",
    LendingObstacle.LENDABLE_GPUS_IN_USE: "Wait for inference to need fewer GPUs there, or change lendable_gpus.",
    LendingObstacle.NO_JOB_WANTS_GPUS: "Submit jobs that can use these GPU models, or widen the range of running ones.",
    LendingObstacle.NEXT_FULL_PASS: "Wait.",
}
