"""The fleet: pools, nodes and loans, and the demand of inference pools with its forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from scheduler.domain.demand_source import PrometheusDemand
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.pod_requirements import NodeCapacity
from scheduler.domain.prefetch import PrefetchResult
from scheduler.domain.replica_advice import ReplicaAdvice
from scheduler.domain.serving import ModelLoad, ModelRate, ServedModel
from scheduler.domain.shortages import ShortageRecord
from scheduler.domain.standby import StandbyState

PROCESSOR_SLOTS = "cpu"
"""GPU profile of nodes whose GPUs are slots for processes that share the processors of a machine."""


class PoolKind(StrEnum):
    TRAINING = "training"
    INFERENCE = "inference"


class NodeState(StrEnum):
    UP = "up"
    DOWN = "down"


NETWORK_BYTES_PER_S_MIN, NETWORK_BYTES_PER_S_MAX = 1e3, 1e14
NETWORK_LATENCY_S_MAX = 60.0
NICS_PER_NODE_MAX = 1024


@dataclass(frozen=True, slots=True)
class PoolNetwork:
    """The network between the nodes of a pool. It replaces the network of the GPU profile for plans on these nodes.

    Args:
        bandwidth_bytes_per_s: what collectives achieve on one network port, in one direction.
        latency_s: start-up time of a collective or message between nodes.
        nics_per_node: network ports of a node that carry traffic of jobs.

    The limits are those of the network in a GPU profile.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    nics_per_node: int = 1

    def __post_init__(self) -> None:
        if not NETWORK_BYTES_PER_S_MIN <= self.bandwidth_bytes_per_s <= NETWORK_BYTES_PER_S_MAX:
            limits = f"{NETWORK_BYTES_PER_S_MIN:g} to {NETWORK_BYTES_PER_S_MAX:g} bytes/s"
            raise ValueError(f"network.bandwidth_bytes_per_s must be {limits}, got {self.bandwidth_bytes_per_s}")
        if not 0 < self.latency_s <= NETWORK_LATENCY_S_MAX:
            limits = f"above 0 and at most {NETWORK_LATENCY_S_MAX:g} s"
            raise ValueError(f"network.latency_s must be {limits}, got {self.latency_s}")
        if not 1 <= self.nics_per_node <= NICS_PER_NODE_MAX:
            raise ValueError(f"network.nics_per_node must be 1 to {NICS_PER_NODE_MAX}, got {self.nics_per_node}")


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of nodes. Without a `network`, plans on its nodes use the network of the GPU profile.

    `demand` is the source that the service polls for the demand of an inference pool. None: demand is reported to the
    API, or by the operator. `serving` are the models whose requests can be reported as demand, each with a name of its
    own.
    """

    name: str
    kind: PoolKind
    lending: LendingPolicy = field(default_factory=LendingPolicy)
    network: PoolNetwork | None = None
    demand: PrometheusDemand | None = None
    serving: tuple[ServedModel, ...] = ()


class IncidentKind(StrEnum):
    """What a machine did to a job.

    HANG: a rank on it made no progress. LOSS: its agent or a supervisor on it was lost. STRAGGLER: it computed more
    slowly than the other nodes of the job.
    """

    HANG = "hang"
    LOSS = "loss"
    STRAGGLER = "straggler"


@dataclass(frozen=True, slots=True)
class NodeIncident:
    """A job that a node has failed or slowed.

    A hang can also be the program's fault. It is confirmed once the job has done more than `steps` steps in a later
    generation without the node.
    """

    kind: IncidentKind
    job_id: str
    owner: str
    at_s: float
    generation: int
    steps: float = 0.0
    detail: str = ""
    is_confirmed: bool = True


def find_lendable_gpus_problem(indices: Sequence[int], gpus: int) -> str:
    """Return the accepted form if these are no lendable GPUs of a node with `gpus` GPUs, or an empty string.

    No indices are accepted: a loan then takes the whole node.
    """
    if not indices:
        return ""
    if gpus < 2:
        return "empty on a node with 1 GPU, which is lent as a whole"
    is_known = all(0 <= index < gpus for index in indices)
    if is_known and len(indices) < gpus and list(indices) == sorted(set(indices)):
        return ""
    return f"1 to {gpus - 1} different GPU indices of 0 to {gpus - 1}, ascending; an empty list lends the whole node"


def list_last_gpus(gpus: int, count: int) -> tuple[int, ...]:
    """Return the indices of the last `count` of `gpus` GPUs."""
    return tuple(range(gpus - count, gpus))


@dataclass(frozen=True, slots=True)
class Node:
    """A host with `gpus` GPUs of one model. `pool` is the pool that owns it, lent or not.

    `inference_gpus` are the GPUs that inference uses, as last observed. `other_gpus` are used by others, for example by
    pods of another scheduler, and are not available to training. A cordoned node accepts no new ranks or loans. A
    draining node is cordoned and its jobs are moved away. A quarantined node is draining because of its `incidents`,
    and `quarantine` says so; it is empty on other nodes. `capacity` is what it offers besides GPUs, as last observed;
    None outside of Kubernetes. A node that is not `lendable` stays with inference, and no loan of the node is proposed
    before `vetoed_until_s`. `standby` are the replicas that can sleep on it, None if its pool has no standby or the
    executor does not observe them. `prefetches` are the ended ones whose pods still exist. `lendable_gpus` are the
    ascending indices of the GPUs that a loan of the node takes while inference goes on serving from the others. Empty:
    a loan takes the whole node.
    """

    name: str
    pool: str
    gpu: str
    gpus: int
    gpu_memory_bytes: int
    state: NodeState = NodeState.UP
    cordoned: bool = False
    draining: bool = False
    inference_gpus: int = 0
    other_gpus: int = 0
    quarantine: str = ""
    incidents: tuple[NodeIncident, ...] = ()
    capacity: NodeCapacity | None = None
    lendable: bool = True
    vetoed_until_s: float = 0.0
    standby: StandbyState | None = None
    prefetches: tuple[PrefetchResult, ...] = ()
    lendable_gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"node {self.name}: gpus must be at least 1, got {self.gpus}")
        if self.gpu_memory_bytes < 1:
            raise ValueError(f"node {self.name}: gpu_memory_bytes must be at least 1, got {self.gpu_memory_bytes}")
        if problem := find_lendable_gpus_problem(self.lendable_gpus, self.gpus):
            raise ValueError(f"node {self.name}: lendable_gpus must be {problem}, got {list(self.lendable_gpus)}")

    @property
    def loan_gpus(self) -> int:
        """Number of GPUs that a loan of the node takes."""
        return len(self.lendable_gpus) or self.gpus

    @property
    def displaced_gpus(self) -> int:
        """Number of GPUs that inference uses now and would have to leave for a loan of the node."""
        return max(0, self.inference_gpus - (self.gpus - self.loan_gpus))

    def find_standby_obstacle(self, now_s: float) -> str:
        """Return why the standby replicas of the node cannot sleep for a loan, or an empty string."""
        if self.standby is None:
            return ""
        if self.lendable_gpus:
            return "standby replicas free all GPUs of a node when they sleep, and lendable_gpus lends only some"
        return self.standby.find_loan_obstacle(now_s)

    @property
    def unschedulable_gpus(self) -> int:
        """Number of GPUs of a cordoned node that inference cannot use.

        Inference pods that run there stay, except on a draining node.
        """
        kept = 0 if self.draining else self.inference_gpus
        return max(0, self.gpus - kept) if self.cordoned else 0


@dataclass(frozen=True, slots=True)
class DemandReading:
    """Number of GPUs that a pool's inference needs, limited to the pool's capacity.

    `asked_gpus` is the reported number. `shortages` is the pool's record up to the newest reading; readings in the
    history have none. `backfills` counts the reports so far that added readings older than the newest one. It changes
    when a forecaster must read the history again. `loads` are the requests from which the number follows, empty if GPUs
    were reported, and `advice` the replicas proposed; readings in the history have neither.
    """

    at_s: float
    gpus: float
    asked_gpus: float
    shortages: ShortageRecord = field(default_factory=ShortageRecord)
    backfills: int = 0
    loads: tuple[ModelLoad, ...] = ()
    advice: tuple[ReplicaAdvice, ...] = ()


def get_shortages(demand: Mapping[str, DemandReading], pool: str) -> ShortageRecord:
    """Return the record of shortages of a pool from the newest readings by pool; an empty one without a reading."""
    reading = demand.get(pool)
    return ShortageRecord() if reading is None else reading.shortages


class LoanState(StrEnum):
    PROPOSED = "proposed"
    OFFERED = "offered"
    ACTIVE = "active"
    RECALLED = "recalled"
    RETURNED = "returned"
    LOST = "lost"
    VETOED = "vetoed"


UNRECALLED_LOAN_STATES = frozenset({LoanState.OFFERED, LoanState.ACTIVE})
EFFECTIVE_LOAN_STATES = UNRECALLED_LOAN_STATES | {LoanState.RECALLED}
"""States in which a loan keeps new inference pods off its GPUs."""
LENT_STATES = frozenset({LoanState.ACTIVE, LoanState.RECALLED})
"""States in which the GPUs of a loan belong to training."""
LIVE_LOAN_STATES = EFFECTIVE_LOAN_STATES | {LoanState.PROPOSED}

LOAN_TRANSITIONS: dict[tuple[LoanState, LoanState], str] = {
    (LoanState.PROPOSED, LoanState.OFFERED): "the notice ended without a veto, and the node can still be lent",
    (LoanState.PROPOSED, LoanState.VETOED): "an administrator or a webhook objected",
    (LoanState.PROPOSED, LoanState.RETURNED): "the node can no longer be lent, or no job wants it",
    (LoanState.OFFERED, LoanState.ACTIVE): "the last inference pod left the node",
    (LoanState.OFFERED, LoanState.RETURNED): "inference needs the node before training used it, or cannot leave it",
    (LoanState.OFFERED, LoanState.LOST): "the node went down before training used it",
    (LoanState.ACTIVE, LoanState.RECALLED): "inference will need the node",
    (LoanState.ACTIVE, LoanState.LOST): "the node went down while lent",
    (LoanState.RECALLED, LoanState.ACTIVE): "the forecast fell, so the recall was cancelled",
    (LoanState.RECALLED, LoanState.RETURNED): "training has left the node",
    (LoanState.RECALLED, LoanState.LOST): "the node went down before it was returned",
}


@dataclass(frozen=True, slots=True)
class Loan:
    """A node of an inference pool that training may use, wholly or in part, from the proposal or offer to the return.

    A proposal changes nothing on its node. `proposed_at_s` is when it was made, None for a loan without notice;
    `offered_at_s` is then when the notice ends, until the node is offered. `return_by_s` is set while the loan is
    recalled: training must have left by then. `lent_at_s` is when training could first use the node. `recalled_at_s` is
    when the recall started, unless it was cancelled. Both remain set after the loan ends. `unused_since_s` is since
    when no job holds GPUs of an active loan's node. `gpus` are those that the loan takes, or 0 in records of older
    releases. `indices` are the GPUs of a partial loan, as they were lendable when it was proposed or offered. Empty: it
    takes all GPUs of the node.
    """

    id: str
    node: str
    pool: str
    state: LoanState
    offered_at_s: float
    state_since_s: float
    return_by_s: float | None = None
    lent_at_s: float | None = None
    recalled_at_s: float | None = None
    unused_since_s: float | None = None
    proposed_at_s: float | None = None
    gpus: int = 0
    indices: tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_LOAN_STATES

    @property
    def is_in_effect(self) -> bool:
        """Whether inference has to leave the GPUs, or has left them. It has not while the loan is only proposed."""
        return self.state in EFFECTIVE_LOAN_STATES

    @property
    def is_unrecalled(self) -> bool:
        return self.state in UNRECALLED_LOAN_STATES

    @property
    def is_lent(self) -> bool:
        """Whether the GPUs belong to training: the loan is active or recalled."""
        return self.state in LENT_STATES

    @property
    def is_partial(self) -> bool:
        """Whether inference goes on serving from other GPUs of the node."""
        return bool(self.indices)

    def count_gpus(self, node: Node) -> int:
        """Return the number of GPUs that the loan takes of its node."""
        return len(self.indices) or node.gpus

    def count_kept_gpus(self, node: Node) -> int:
        """Return the number of GPUs of the node that stay with inference."""
        return node.gpus - self.count_gpus(node)

    @property
    def created_at_s(self) -> float:
        """When the loan was proposed, or offered without notice. It never changes."""
        return self.offered_at_s if self.proposed_at_s is None else self.proposed_at_s

    def transition_to(self, state: LoanState, now_s: float, *, return_by_s: float | None = None) -> Loan:
        """Return the loan in its next state.

        Raises:
            ValueError: LOAN_TRANSITIONS does not contain this transition.
        """
        if (self.state, state) not in LOAN_TRANSITIONS:
            raise ValueError(f"loan {self.id}: there is no transition from {self.state} to {state}")
        lent_at_s = now_s if self.lent_at_s is None and state is LoanState.ACTIVE else self.lent_at_s
        recalled_at_s = {LoanState.ACTIVE: None, LoanState.RECALLED: now_s}.get(state, self.recalled_at_s)
        return replace(
            self,
            state=state,
            state_since_s=now_s,
            return_by_s=return_by_s,
            offered_at_s=now_s if state is LoanState.OFFERED else self.offered_at_s,
            lent_at_s=lent_at_s,
            recalled_at_s=recalled_at_s,
        )


def count_training_gpus(node: Node, loan: Loan | None) -> int:
    """Count the GPUs of a node that serves training and that jobs can use."""
    gpus = node.gpus if loan is None else loan.count_gpus(node)
    return max(0, gpus - count_taken_gpus(node, loan))


def count_taken_gpus(node: Node, loan: Loan | None) -> int:
    """Count the GPUs of a node that serves training and that others use: foreign pods, or inference beyond its part."""
    if loan is None or not loan.is_partial:
        return node.other_gpus
    return node.other_gpus + max(0, node.inference_gpus - loan.count_kept_gpus(node))


def build_loan_id(node: str, generation: int) -> str:
    """Return the id of a loan of the node that begins with this generation of the snapshot."""
    return f"{node}-{generation}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Quantiles of the largest GPU demand of one pool within the next `horizon_s` seconds.

    `quantiles` are ascending levels in (0, 1). Demand stays at or below `gpus[i]` with probability `quantiles[i]`.
    `method` names the forecaster. `lasting_gpus` are the same quantiles over the shortest acceptable loan; they are
    empty if the horizon covers it. Without calibration the quantiles are a guess: too few forecasts have met their
    outcome. `event` names the known event that raises the quantiles above those of the method, if any. `rates` are the
    expected request rates of models that are sized.
    """

    made_at_s: float
    horizon_s: float
    quantiles: tuple[float, ...]
    gpus: tuple[float, ...]
    method: str
    lasting_gpus: tuple[float, ...] = ()
    is_calibrated: bool = True
    event: str = ""
    rates: tuple[ModelRate, ...] = ()

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(self.gpus) or not self.quantiles:
            raise ValueError(
                "a forecast needs at least one quantile and one number of GPUs per quantile, "
                f"got {len(self.quantiles)} quantiles and {len(self.gpus)} numbers"
            )
        if list(self.quantiles) != sorted(self.quantiles):
            raise ValueError(f"quantiles must ascend, got {self.quantiles}")

    def demand_at(self, quantile: float) -> float:
        """Return the demand at the lowest level that is at least `quantile`, or at the highest level."""
        return self.gpus[self._level_index(quantile)]

    def min_loan_demand_at(self, quantile: float) -> float:
        """Return the demand over the shortest acceptable loan, at the level that `demand_at` uses."""
        return (self.lasting_gpus or self.gpus)[self._level_index(quantile)]

    def find_rate(self, model: str, rate_per_s: float, now_s: float) -> float:
        """Return the request rate of a model to be ready for while the reported one is `rate_per_s`."""
        expected = next((each for each in self.rates if each.model == model), None)
        return rate_per_s if expected is None else expected.find_rate(rate_per_s, now_s)

    def with_min_loan_forecast(self, longer: Forecast) -> Forecast:
        """Return this forecast with the demand of `longer` for the shortest acceptable loan."""
        return replace(self, lasting_gpus=longer.gpus, event=self.event or longer.event)

    def _level_index(self, quantile: float) -> int:
        levels = enumerate(self.quantiles)
        return next((index for index, level in levels if level >= quantile), len(self.quantiles) - 1)


@dataclass(frozen=True, slots=True)
class ForecastFan:
    """Quantiles of the GPU demand of one pool, for display. Lending does not use them.

    With probability `quantiles[j]`, the largest demand of the `bin_s` seconds from `at_s[i]` stays at or below
    `gpus[i][j]`. Times and quantiles ascend.
    """

    pool: str
    made_at_s: float
    bin_s: float
    quantiles: tuple[float, ...]
    at_s: tuple[float, ...]
    gpus: tuple[tuple[float, ...], ...]
    method: str
