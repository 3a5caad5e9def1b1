"""ScalingCurve: the step time of a job on each GpuShape, from solved parallel plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from types import MappingProxyType

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.learned_constants import LearnedConstants
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage
from scheduler.domain.plan_limits import NO_LIMITS, PlanLimits
from scheduler.domain.relative_speed import RelativeSpeed, SpeedSource

LINEAR_CURVE_KEY = "linear"
LengthHistogram = tuple[tuple[int, int], ...]
"""Pairs (tokens, number of samples of that length), in ascending order of tokens."""
_ASSUMED_SPEED = RelativeSpeed(1.0, SpeedSource.ASSUMED)


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Solved plans of one model at one global batch, by shape, and infeasible shapes with the reason.

    A shape in neither mapping is not solved yet. The private fields cache results, because policies look up curves many
    times in each tick.
    """

    plans: Mapping[GpuShape, ParallelPlan] = field(default_factory=dict)
    infeasible: Mapping[GpuShape, str] = field(default_factory=dict)
    _faster_subsets: dict[tuple[GpuShape, int], GpuShape | None] = field(
        default_factory=dict, compare=False, repr=False, metadata={"derived": True}
    )
    _infeasible_counts: dict[int, None] = field(
        default_factory=dict, compare=False, repr=False, metadata={"derived": True}
    )
    _packed_plans: dict[tuple[str, int], Mapping[int, ParallelPlan]] = field(
        default_factory=dict, compare=False, repr=False, metadata={"derived": True}
    )
    _efficient_counts: dict[tuple[str, int, int, int, float], int | None] = field(
        default_factory=dict, compare=False, repr=False, metadata={"derived": True}
    )
    _least_step_gpu_s: dict[tuple[str, int], float | None] = field(
        default_factory=dict, compare=False, repr=False, metadata={"derived": True}
    )

    def plan_for(self, shape: GpuShape) -> ParallelPlan | None:
        return self.plans.get(shape)

    def packed_plans(self, gpu: str, gpus_per_node: int) -> Mapping[int, ParallelPlan]:
        """Return the plans on as few nodes of this kind as possible, by number of GPUs."""
        key = (gpu, gpus_per_node)
        if key not in self._packed_plans:
            self._packed_plans[key] = {
                shape.gpus: plan
                for shape, plan in self.plans.items()
                if shape == GpuShape.packed(gpu, shape.gpus, gpus_per_node)
            }
        return self._packed_plans[key]

    def has_infeasible_shape(self, gpus: int) -> bool:
        """Return whether at least one shape of `gpus` GPUs is infeasible."""
        if not self._infeasible_counts:
            self._infeasible_counts.update((shape.gpus, None) for shape in self.infeasible)
        return gpus in self._infeasible_counts

    def min_efficient_gpus(
        self, gpu: str, gpus_per_node: int, min_gpus: int, max_gpus: int, efficiency: float
    ) -> int | None:
        """Return the smallest planned GPU count in the range that reaches `efficiency`, or None if none is planned.

        Efficiency is the GPU-seconds per step of the cheapest count in the range, divided by those of the count itself.
        """
        key = (gpu, gpus_per_node, min_gpus, max_gpus, efficiency)
        if key not in self._efficient_counts:
            planned = self.packed_plans(gpu, gpus_per_node)
            costs = {
                gpus: gpus * plan.iteration_time_s for gpus, plan in planned.items() if min_gpus <= gpus <= max_gpus
            }
            best = min(costs.values(), default=0.0)
            self._efficient_counts[key] = min(
                (gpus for gpus, cost in costs.items() if efficiency * cost <= best), default=None
            )
        return self._efficient_counts[key]

    def least_step_gpu_s(self, gpu: str, gpus_per_node: int) -> float | None:
        """Return the least GPU-seconds per step of the plans on this kind of node, or None if there is no plan.

        The ratio of two GPU models is their relative speed for this job where communication costs least.
        """
        key = (gpu, gpus_per_node)
        if key not in self._least_step_gpu_s:
            plans = self.packed_plans(gpu, gpus_per_node).items()
            self._least_step_gpu_s[key] = min((gpus * plan.iteration_time_s for gpus, plan in plans), default=None)
        return self._least_step_gpu_s[key]

    def is_solved(self, shape: GpuShape) -> bool:
        return shape in self.plans or shape in self.infeasible

    def is_count_solved(self, gpus: int) -> bool:
        """Return whether at least one shape of `gpus` GPUs is solved, as feasible or infeasible."""
        return any(shape.gpus == gpus for shape in (*self.plans, *self.infeasible))

    def faster_subset(self, shape: GpuShape, gpus_min: int = 1) -> GpuShape | None:
        """Return the fastest solved subset of `shape` that is at least as fast, or None. Other GPUs would be wasted.

        Only subsets of `gpus_min` GPUs or more are considered. Among equally fast subsets, the one with fewest GPUs is
        returned.
        """
        key = (shape, gpus_min)
        if key not in self._faster_subsets:
            self._faster_subsets[key] = self._find_faster_subset(shape, gpus_min)
        return self._faster_subsets[key]

    def _find_faster_subset(self, shape: GpuShape, gpus_min: int) -> GpuShape | None:
        plan = self.plans.get(shape)
        if plan is None:
            return None
        subsets = [
            (other.iteration_time_s, subset.gpus, subset)
            for subset, other in self.plans.items()
            if other.iteration_time_s <= plan.iteration_time_s
            and gpus_min <= subset.gpus < shape.gpus
            and _is_subset(subset, shape)
        ]
        return min(subsets)[2] if subsets else None

    def with_plan(self, shape: GpuShape, plan: ParallelPlan) -> ScalingCurve:
        return ScalingCurve({**self.plans, shape: plan}, self.infeasible)

    def without_gpus(self, gpus: Collection[str]) -> ScalingCurve:
        """Return the curve without the points whose shapes name one of these GPU models.

        A point depends on the hardware of its own GPU models only, whatever search found it.
        """
        kept = {shape for shape in (*self.plans, *self.infeasible) if not any(g.gpu in gpus for g in shape.groups)}
        if len(kept) == len(self.plans) + len(self.infeasible):
            return self
        return ScalingCurve(
            {shape: plan for shape, plan in self.plans.items() if shape in kept},
            {shape: reason for shape, reason in self.infeasible.items() if shape in kept},
        )

    def with_infeasible(self, shape: GpuShape, reason: str) -> ScalingCurve:
        return ScalingCurve(self.plans, {**self.infeasible, shape: reason})


@dataclass(frozen=True, slots=True)
class LinearCurve:
    """The curve of a job without a model: data parallelism with ideal scaling on every shape.

    One step is one GPU-second of work on a GPU of the reference model: a job that ran `d` seconds on `g` of them has
    `d * g` steps. `speeds` holds the known speeds relative to the reference model, by GPU model. All other models count
    as equally fast.
    """

    speeds: Mapping[str, RelativeSpeed] = field(default_factory=dict)

    def plan_for(self, shape: GpuShape) -> ParallelPlan | None:
        """Return the plan with one replica per GPU. A mix of GPU models has one only if all their speeds are known."""
        counts = Counter[str]()
        for group in shape.groups:
            counts[group.gpu] += group.gpus
        if len(counts) > 1 and not counts.keys() <= self.speeds.keys():
            return None
        return _build_replicated_plan(tuple((gpu, gpus, self.speed_on(gpu).value) for gpu, gpus in counts.items()))

    def speed_on(self, gpu: str) -> RelativeSpeed:
        return self.speeds.get(gpu, _ASSUMED_SPEED)

    def is_solved(self, shape: GpuShape) -> bool:
        return True

    def is_count_solved(self, gpus: int) -> bool:
        return True

    def faster_subset(self, shape: GpuShape, gpus_min: int = 1) -> GpuShape | None:
        """Return None, because every GPU makes the job faster."""
        return None

    @property
    def infeasible(self) -> Mapping[GpuShape, str]:
        return MappingProxyType({})


def check_length_histogram(lengths: LengthHistogram) -> None:
    """Check that tokens ascend, and that tokens and samples are at least 1.

    Raises:
        ValueError: they do not. The message names the lengths.
    """
    for tokens, samples in lengths:
        if tokens < 1 or samples < 1:
            raise ValueError(f"lengths must have tokens and samples of at least 1, got {tokens}: {samples}")
    for (tokens, _), (longer, _) in pairwise(lengths):
        if tokens >= longer:
            raise ValueError(f"lengths must be in ascending order of tokens, got {tokens} before {longer}")


@dataclass(frozen=True, slots=True)
class CurveRequest:
    """Input of the solver for a curve, except the shapes. Equal requests share one curve.

    `model` names a preset. `profile_json` is a complete model profile as canonical JSON instead. Plans must fit when
    `memory_percent` percent of their predicted peak memory is used. The first `frozen_layers` layers are not trained.
    `lengths` is as in JobSpec: if it is not empty, plans are for samples of these lengths. All plans are within
    `limits`. Each is the simplest one that is slower than the fastest by at most the ratio `simplicity`. `constants`
    correct the profiles of GPU models.
    """

    model: str
    profile_json: str
    global_batch: int
    sequence_length: int
    memory_percent: int = 100
    frozen_layers: int = 0
    lengths: LengthHistogram = ()
    limits: PlanLimits = NO_LIMITS
    simplicity: float = 0.0
    constants: LearnedConstants = ()

    @property
    def model_key(self) -> str:
        """Key of the model, at one length of samples, whatever the batch and the limits."""
        return f"{name_model(self.model, self.profile_json)}/seq-{self.sequence_length}"

    @property
    def key(self) -> str:
        return curve_key(
            self.model,
            self.profile_json,
            self.global_batch,
            self.sequence_length,
            memory_percent=self.memory_percent,
            frozen_layers=self.frozen_layers,
            lengths=self.lengths,
            limits=self.limits,
            simplicity=self.simplicity,
            constants=self.constants,
        )


@lru_cache(maxsize=4096)
def curve_key(
    model: str,
    profile_json: str,
    global_batch: int,
    sequence_length: int,
    *,
    memory_percent: int = 100,
    frozen_layers: int = 0,
    lengths: LengthHistogram = (),
    limits: PlanLimits = NO_LIMITS,
    simplicity: float = 0.0,
    constants: LearnedConstants = (),
) -> str:
    """Return the content address of a curve: readable for presets, with digests of what is long."""
    name = name_model(model, profile_json)
    memory = f"/memory-{memory_percent}" if memory_percent != 100 else ""
    frozen = f"/frozen-{frozen_layers}" if frozen_layers else ""
    unlike = "/lengths-" + sha256(repr(lengths).encode()).hexdigest()[:16] if lengths else ""
    limited = f"/limits-{limits.key}" if limits != NO_LIMITS else ""
    simple = f"/simplicity-{simplicity:g}" if simplicity else ""
    learned = "/learned-" + sha256(repr(constants).encode()).hexdigest()[:16] if constants else ""
    return f"{name}/batch-{global_batch}/seq-{sequence_length}{memory}{frozen}{unlike}{limited}{simple}{learned}"


@lru_cache(maxsize=4096)
def name_model(model: str, profile_json: str) -> str:
    """Return the name of a preset, or a short digest of a job's own profile."""
    return model or "profile-" + sha256(profile_json.encode()).hexdigest()[:16]


Curve = ScalingCurve | LinearCurve
LINEAR_CURVE = LinearCurve()


def _is_subset(subset: GpuShape, shape: GpuShape) -> bool:
    """Return whether `subset` can be made from `shape` by removing GPUs from its nodes."""
    return all(_count_matching_nodes(group, subset) <= _count_matching_nodes(group, shape) for group in subset.groups)


def _count_matching_nodes(group: GpuGroup, shape: GpuShape) -> int:
    """Count the nodes of `shape` with at least as many GPUs of the same model."""
    return sum(
        other.nodes for other in shape.groups if other.gpu == group.gpu and other.gpus_per_node >= group.gpus_per_node
    )


def build_data_parallel_plan(gpu: str, gpus: int) -> ParallelPlan:
    """Return the plan with one replica per GPU. One step is one GPU-second of work. Peak memory is unknown (0)."""
    return _build_replicated_plan(((gpu, gpus, 1.0),))


@lru_cache(maxsize=4096)
def _build_replicated_plan(parts: tuple[tuple[str, int, float], ...]) -> ParallelPlan:
    """Return the plan with one replica per GPU, for parts of (GPU model, GPUs, relative speed).

    Each GPU gets a share of the batch in proportion to its speed, so that speeds add up.
    """
    steps_per_s = sum(gpus * speed for _, gpus, speed in parts)
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=1,
        micro_batch_size=1,
        iteration_time_s=1.0 / steps_per_s,
        samples_per_s=float(steps_per_s),
        peak_bytes_per_gpu=0,
        stages=tuple(Stage(0, 0, gpu, gpus, (LayerStrategy(layers=1, dp=gpus),)) for gpu, gpus, _ in parts),
    )
