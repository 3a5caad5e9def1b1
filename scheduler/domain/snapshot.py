"""Snapshot: all live state at one time and generation. Immutable, complete, replayable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.domain import gpu_sets
from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState, Node, Pool, PoolKind
from scheduler.domain.gpu_sets import Gpus, GpuShape, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import Allocation
from scheduler.domain.scaling_curve import LINEAR_CURVE, Curve, CurveRequest, ScalingCurve
from scheduler.domain.snapshot_index import GpuKind, SnapshotIndex, count_inference_gpus, must_vacate, serves_training

UNSOLVED_CURVE = ScalingCurve()


@dataclass(frozen=True, slots=True)
class Switches:
    """What operators can stop with one command. `loans_recalled` also takes back every loan there is."""

    lending_paused: bool = False
    loans_recalled: bool = False
    resizes_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs by id, pools, nodes and declared queues by name, live loans by node name, curves by content key.

    `solver` is the fingerprint of the solver whose points the curves hold.
    `full_pass_at_s` is when a tick last considered lending and flexible GPUs; between full passes a tick only
    reacts (arrivals, ends, recalls). `memo` is the ledger of this snapshot, or of one that it was made from: no part
    of its value.
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
    queues: Mapping[str, JobQueue] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    full_pass_at_s: float = float("-inf")
    solver: str = ""
    cached_index: SnapshotIndex | None = field(default=None, compare=False, repr=False, metadata={"derived": True})

    def curve(self, job: Job) -> Curve:
        return self.profile_curve(job) if job.spec.has_profile else LINEAR_CURVE

    def profile_curve(self, job: Job) -> ScalingCurve:
        """The curve of a job that has a model; an empty one where nothing is solved yet."""
        return self.curves.get(job.curve_key, UNSOLVED_CURVE)

    def curve_requests(self) -> Mapping[str, CurveRequest]:
        """What the curves of all live jobs are solved for, by key: for what is known of a job's memory and frozen
        layers now, not as it was submitted."""
        profiled = (job for job in self.jobs.values() if job.spec.has_profile)
        return {request.key: request for job in profiled for request in job.curve_requests}

    def shape_of(self, gpus: Gpus) -> GpuShape:
        """The shape of exact GPUs. Raises KeyError for a node that does not exist."""
        return GpuShape.from_node_counts((self.nodes[node].gpu, len(indices)) for node, indices in gpus.items())

    def default_rank_placement(self, gpus: Gpus) -> RankPlacement:
        """The GPU of each rank where nothing speaks for another order: training's own nodes first, by name, so that
        rank 0 sits on one where there is one."""
        known = ((name, self.nodes.get(name)) for name in gpus)
        owned = {name for name, node in known if node and self.pools[node.pool].kind is PoolKind.TRAINING}
        return gpu_sets.place_ranks(gpus, first=owned)

    def rank_placement(self, allocation: Allocation) -> RankPlacement:
        """The GPU of each rank of the allocation's generation."""
        return allocation.seats or self.default_rank_placement(allocation.target)

    @property
    def index(self) -> SnapshotIndex:
        """Who holds what and what is free. Worked out once, then carried along by `replace`; not to be changed."""
        memo = self.cached_index
        if memo is None or not memo.matches(self):
            memo = memo.derive_for(self) if memo is not None else SnapshotIndex.build(self)
            object.__setattr__(self, "cached_index", memo)
        return memo

    @property
    def typical_node_sizes(self) -> Mapping[str, int]:
        """GPUs of the commonest node of each GPU model: canonical shapes are packed into those."""
        memo = self.cached_index
        return (memo if memo is not None and memo.nodes is self.nodes else self.index).typical_node_sizes()

    @property
    def training_gpus(self) -> Mapping[GpuKind, int]:
        """GPUs of the nodes on which training may put something new, free or not, by kind."""
        memo = self.cached_index
        same = memo is not None and memo.nodes is self.nodes and memo.loans is self.loans
        return (memo if memo is not None and same else self.index).training_gpus

    def serves_training(self, node: Node) -> bool:
        """Training may put something new on this node now."""
        return serves_training(node, self.pools, self.loans.get(node.name))

    def is_lent(self, node: Node) -> bool:
        loan = self.loans.get(node.name)
        return loan is not None and loan.state in (LoanState.ACTIVE, LoanState.RECALLED)

    def must_vacate(self, node: Node) -> bool:
        """Training has to get off this node: recalled, down, draining, or not lent (any more)."""
        return must_vacate(node, self.pools, self.loans.get(node.name))

    def count_inference_gpus(self, node: Node) -> int:
        """GPUs that inference has on a node of its own."""
        return count_inference_gpus(node, self.loans.get(node.name))

    def capacity(self, pool: str) -> int:
        """GPUs of a pool's nodes that are up."""
        return self.index.capacity(pool)
