"""Snapshot: all live state at one time and generation. Immutable, complete, replayable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.domain.fleet import DemandReading, Node, NodeState, Pool, PoolKind
from scheduler.domain.forecast import Forecast
from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.scaling_curve import LINEAR_CURVE, LINEAR_CURVE_KEY, Curve, ScalingCurve

UNSOLVED = ScalingCurve()


@dataclass(frozen=True, slots=True)
class Switches:
    """What operators can stop with one command. `loans_recalled` also takes back every loan there is."""

    lending_paused: bool = False
    loans_recalled: bool = False
    resizes_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs by id, pools and nodes by name, live loans by node name, curves by content key.

    `solver` is the fingerprint of the solver whose points the curves hold.
    `full_pass_at_s` is when a tick last considered lending and flexible GPUs; between full passes a tick only
    reacts (arrivals, ends, recalls).
    """

    generation: int = 0
    now_s: float = 0.0
    pools: Mapping[str, Pool] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    loans: Mapping[str, Loan] = field(default_factory=dict)
    curves: Mapping[str, ScalingCurve] = field(default_factory=dict)
    demand: Mapping[str, DemandReading] = field(default_factory=dict)
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    full_pass_at_s: float = float("-inf")
    solver: str = ""

    def curve(self, job: Job) -> Curve:
        key = job.spec.curve_key
        return LINEAR_CURVE if key == LINEAR_CURVE_KEY else self.curves.get(key, UNSOLVED)

    def shape_of(self, gpus: Gpus) -> GpuShape:
        """The shape of exact GPUs. Raises KeyError for a node that does not exist."""
        return GpuShape.of_counts((self.nodes[node].gpu, len(indices)) for node, indices in gpus.items())

    def serves_training(self, node: Node) -> bool:
        """Training may put something new on this node now."""
        if node.state is not NodeState.UP or node.cordoned:
            return False
        if self.pools[node.pool].kind is PoolKind.TRAINING:
            return True
        loan = self.loans.get(node.name)
        return loan is not None and loan.state is LoanState.ACTIVE

    def is_lent(self, node: Node) -> bool:
        loan = self.loans.get(node.name)
        return loan is not None and loan.state in (LoanState.ACTIVE, LoanState.RECALLED)

    def must_be_left(self, node: Node) -> bool:
        """Training has to get off this node: recalled, down, draining, or not lent (any more)."""
        if node.state is not NodeState.UP or node.draining:
            return True
        return self.pools[node.pool].kind is PoolKind.INFERENCE and not (
            (loan := self.loans.get(node.name)) is not None and loan.state is LoanState.ACTIVE
        )

    def capacity(self, pool: str) -> int:
        """GPUs of a pool's nodes that are up."""
        return sum(n.gpus for n in self.nodes.values() if n.pool == pool and n.state is NodeState.UP)
