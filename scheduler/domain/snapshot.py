"""Snapshot: all live state of the service at one time and generation. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.domain import gpu_sets
from scheduler.domain.fleet import DemandReading, Forecast, Loan, Node, Pool, PoolKind
from scheduler.domain.gpu_sets import Gpus, GpuShape, RankPlacement
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_speed import with_measured_speeds
from scheduler.domain.job_state import Allocation
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.domain.relative_speed import resolve_prior_speeds
from scheduler.domain.return_times import ReturnTimes
from scheduler.domain.run_times import RunTimes
from scheduler.domain.scaling_curve import LINEAR_CURVE, Curve, CurveRequest, LinearCurve, ScalingCurve
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot_index import GpuKind, SnapshotIndex, count_inference_gpus, must_vacate, serves_training
from scheduler.domain.step_measurements import ModelMeasurements

UNSOLVED_CURVE = ScalingCurve()
_PriorKey = tuple[str, tuple[tuple[str, float], ...]]
"""Reference model, and declared speeds."""


@dataclass(frozen=True, slots=True)
class Switches:
    """Switches of the operator. `loans_recalled` also recalls every existing loan."""

    lending_paused: bool = False
    loans_recalled: bool = False
    resizes_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs by id; pools, nodes and created queues by name; live loans by node name; curves by key.

    `solver` is the fingerprint of the solver that made the curves, and `curve_hardware` the digest of what was set for
    each GPU model when it made them. `full_pass_at_s` is when a tick last considered
    lending and resizing; ticks in between only react to arrivals, exits and recalls. `gpu_throughputs` is the work per
    second of each GPU model by its profile, in a common unit. `run_times` are those of ended jobs, and
    `step_measurements` the measured steps of plans by GPU model and model. All three are empty in snapshots of older
    versions. `gpu_profiles` are the profiles that were set on the service, by GPU model. `return_times` are measured
    times of the way back of recalled nodes, by pool, `recalls` the open receipts of recalls, by node, and `shadows` the
    loans that pools in shadow mode would have made. `lending_set_by` is the display name of the caller who last paused,
    recalled or resumed lending, and `lending_set_at_s` when; None if that was never done, or by an older release.

    `cached_index` is the index of this snapshot or of a predecessor, and `prior_curves` holds linear curves without
    measurements, with the table of throughputs that they are from. They are not part of the value.
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
    gpu_throughputs: Mapping[str, float] = field(default_factory=dict)
    run_times: Mapping[str, RunTimes] = field(default_factory=dict)
    gpu_profiles: Mapping[str, GpuProfile] = field(default_factory=dict)
    step_measurements: Mapping[str, ModelMeasurements] = field(default_factory=dict)
    curve_hardware: Mapping[str, str] = field(default_factory=dict)
    return_times: Mapping[str, ReturnTimes] = field(default_factory=dict)
    shadows: Mapping[str, ShadowLending] = field(default_factory=dict)
    lending_set_by: str = ""
    lending_set_at_s: float | None = None
    recalls: Mapping[str, RecallReceipt] = field(default_factory=dict)
    cached_index: SnapshotIndex | None = field(default=None, compare=False, repr=False, metadata={"derived": True})
    prior_curves: dict[_PriorKey, tuple[Mapping[str, float], LinearCurve]] = field(
        default_factory=dict, compare=False, repr=False, metadata={"derived": True}
    )

    def curve(self, job: Job) -> Curve:
        return self.profile_curve(job) if job.spec.has_profile else self.linear_curve(job)

    def linear_curve(self, job: Job) -> LinearCurve:
        """Return the curve of a job without a model. All GPUs are equally fast in a fleet of one GPU model."""
        if not self.gpu_throughputs and not job.spec.speeds and not job.progress.other_gpus:
            return LINEAR_CURVE
        index, gpu = self._node_index, job.spec.gpu
        fleet_gpu = index.reference_gpu
        if gpu in ("", fleet_gpu) and not job.progress.other_gpus and index.has_reference_only:
            return LINEAR_CURVE
        return with_measured_speeds(job, self._prior_curve(gpu or fleet_gpu, job.spec.speeds))

    def _prior_curve(self, reference: str, declared: Mapping[str, float]) -> LinearCurve:
        key = (reference, tuple(declared.items()) if declared else ())
        throughputs, curve = self.prior_curves.get(key, (None, LINEAR_CURVE))
        if throughputs is not self.gpu_throughputs:
            curve = LinearCurve(resolve_prior_speeds(reference, declared, self.gpu_throughputs))
            self.prior_curves[key] = self.gpu_throughputs, curve
        return curve

    @property
    def reference_gpu(self) -> str:
        """The most common GPU model of training pools, or empty if these have no nodes."""
        return self._node_index.reference_gpu

    def profile_curve(self, job: Job) -> ScalingCurve:
        """Return the curve of a job with a model, empty if nothing is solved yet."""
        return self.curves.get(job.curve_key, UNSOLVED_CURVE)

    def curve_requests(self) -> Mapping[str, CurveRequest]:
        """Return the curves to solve for all live jobs, by key, for their current memory records and frozen layers."""
        profiled = (job for job in self.jobs.values() if job.spec.has_profile)
        return {request.key: request for job in profiled for request in job.curve_requests}

    def shape_of(self, gpus: Gpus) -> GpuShape:
        """Return the shape of these GPUs.

        Raises:
            KeyError: a node does not exist.
        """
        return GpuShape.from_node_counts((self.nodes[node].gpu, len(indices)) for node, indices in gpus.items())

    def default_rank_placement(self, gpus: Gpus) -> RankPlacement:
        """Return the default GPU of each rank: training's own nodes first, by name.

        Rank 0 is thus on a node that cannot be recalled, if there is one.
        """
        known = ((name, self.nodes.get(name)) for name in gpus)
        owned = {name for name, node in known if node and self.pools[node.pool].kind is PoolKind.TRAINING}
        return gpu_sets.place_ranks(gpus, first=owned)

    def rank_placement(self, allocation: Allocation) -> RankPlacement:
        """Return the GPU of each rank of the allocation's generation."""
        return allocation.seats or self.default_rank_placement(allocation.target)

    @property
    def index(self) -> SnapshotIndex:
        """Index of the nodes, loans and jobs. Built once, then carried along by `replace`. Do not modify it."""
        index = self.cached_index
        if index is None or not index.matches(self):
            index = index.derive_for(self) if index is not None else SnapshotIndex.build(self)
            object.__setattr__(self, "cached_index", index)
        return index

    @property
    def typical_node_sizes(self) -> Mapping[str, int]:
        """GPUs per node of the most common node size of each GPU model."""
        return self._node_index.typical_node_sizes()

    @property
    def _node_index(self) -> SnapshotIndex:
        """Index that is current for nodes and pools. It may be outdated for jobs and loans."""
        index = self.cached_index
        is_current = index is not None and index.nodes is self.nodes and index.pools is self.pools
        return index if index is not None and is_current else self.index

    @property
    def training_gpus(self) -> Mapping[GpuKind, int]:
        """Number of GPUs, free or not, on nodes that accept training, by kind."""
        index = self.cached_index
        is_current = index is not None and index.nodes is self.nodes and index.loans is self.loans
        return (index if index is not None and is_current else self.index).training_gpus

    def serves_training(self, node: Node) -> bool:
        """Return whether training may start ranks on this node."""
        return serves_training(node, self.pools, self.loans.get(node.name))

    def is_lent(self, node: Node) -> bool:
        loan = self.loans.get(node.name)
        return loan is not None and loan.is_lent

    def is_partly_lent(self, node: Node) -> bool:
        """Return whether the node is lent and inference still serves from a part of its GPUs."""
        loan = self.loans.get(node.name)
        return loan is not None and loan.is_lent and loan.is_partial

    def must_vacate(self, node: Node) -> bool:
        """Return whether training must leave this node: it is recalled, down, draining or not lent."""
        return must_vacate(node, self.pools, self.loans.get(node.name))

    def count_inference_gpus(self, node: Node) -> int:
        """Count the GPUs of the node that inference can use."""
        return count_inference_gpus(node, self.loans.get(node.name))

    def capacity(self, pool: str) -> int:
        """Return the number of GPUs on the pool's nodes that are up."""
        return self.index.capacity(pool)
