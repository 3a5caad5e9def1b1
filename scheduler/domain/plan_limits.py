"""PlanLimits: what the plans of a search may use, and why a given plan breaks the limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, ScheduleName
from scheduler.domain.suggestions import suggest


class PlanDimension(StrEnum):
    """A property of a plan that limits can exclude.

    `ddp` to `hybrid_shard` say how several replicas hold the weights: `ddp` keeps them whole, `zero1`, `zero2` and
    `fsdp` shard them over all replicas, `hybrid_shard` is FSDP within a node. `1f1b`, `interleave` and `gpipe` are the
    schedules of pipelines. `recompute` is full recomputation. `offload` keeps optimizer state in host memory,
    `offload_parameters` parameters and gradients as well, and `offload_activations` the inputs of recomputed layers.
    """

    DATA = "data"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    HYBRID_SHARD = "hybrid_shard"
    TENSOR = "tensor"
    SEQUENCE_SHARDING = "sequence_sharding"
    ULYSSES = "ulysses"
    RING = "ring"
    EXPERT = "expert"
    PIPELINE = "pipeline"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVE = "interleave"
    GPIPE = "gpipe"
    RECOMPUTE = "recompute"
    SELECTIVE_RECOMPUTE = "selective_recompute"
    OFFLOAD = "offload"
    OFFLOAD_PARAMETERS = "offload_parameters"
    OFFLOAD_ACTIVATIONS = "offload_activations"


SHARDINGS = (
    PlanDimension.DDP,
    PlanDimension.ZERO1,
    PlanDimension.ZERO2,
    PlanDimension.FSDP,
    PlanDimension.HYBRID_SHARD,
)
"""How several replicas hold the weights: each layer uses one of these, or none if there is one replica."""

SCHEDULES = {
    ScheduleName.ONE_F_ONE_B: PlanDimension.ONE_F_ONE_B,
    ScheduleName.INTERLEAVED: PlanDimension.INTERLEAVE,
    ScheduleName.GPIPE: PlanDimension.GPIPE,
}

DEGREES = (
    PlanDimension.PIPELINE,
    PlanDimension.TENSOR,
    PlanDimension.DATA,
    PlanDimension.ULYSSES,
    PlanDimension.RING,
    PlanDimension.EXPERT,
    PlanDimension.INTERLEAVE,
)
"""Dimensions with a degree. That of `interleave` is the number of chunks per device."""


_SHORT_NAMES = {
    "dp": (PlanDimension.DATA,),
    "tp": (PlanDimension.TENSOR,),
    "pp": (PlanDimension.PIPELINE,),
    "ep": (PlanDimension.EXPERT,),
    "sp": (PlanDimension.SEQUENCE_SHARDING,),
    "cp": (PlanDimension.ULYSSES, PlanDimension.RING),
    "zero": (PlanDimension.ZERO1, PlanDimension.ZERO2),
    "zero3": (PlanDimension.FSDP,),
}
"""Other names that users may write; some stand for two dimensions."""


def list_dimension_names() -> list[str]:
    """Return all names that `parse_dimension_name` accepts."""
    return [*(dimension.value for dimension in PlanDimension), *_SHORT_NAMES]


def parse_dimension_name(name: str) -> tuple[PlanDimension, ...]:
    """Return the dimensions that a name stands for; `-` and `_` mean the same.

    Raises:
        ValueError: the name is unknown. The message is what is accepted.
    """
    plain = name.strip().lower().replace("-", "_")
    if plain in _SHORT_NAMES:
        return _SHORT_NAMES[plain]
    if plain not in list(PlanDimension):
        raise ValueError(f"one of {', '.join(list_dimension_names())}{suggest(plain, list_dimension_names())}")
    return (PlanDimension(plain),)


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits of a search. Without arguments, there are none.

    Attributes:
        excluded: dimensions that a plan may not use.
        exclusive: pairs of dimensions that no layer of a plan may use together. The pipeline's dimensions count as used
            by every layer.
        degrees_max: largest degrees, as pairs (one of DEGREES, degree).
        micro_batches_min: smallest number of micro-batches in a step; `micro_batches_max` None means no maximum.
        replica_samples_max: samples of a micro-batch on one data-parallel replica; None means no maximum.
        fills_pipeline: a plan needs at least as many micro-batches as pipeline stages.
        has_whole_rounds: the number of micro-batches is a multiple of the pipeline stages.
        is_uniform: all layers of all stages have the same strategy.
        has_equal_stages: all stages have the same number of layers.
        has_equal_chunks: the same for interleaved pipelines alone.
    """

    excluded: tuple[PlanDimension, ...] = ()
    exclusive: tuple[tuple[PlanDimension, PlanDimension], ...] = ()
    degrees_max: tuple[tuple[PlanDimension, int], ...] = ()
    micro_batches_min: int = 1
    micro_batches_max: int | None = None
    replica_samples_max: int | None = None
    fills_pipeline: bool = False
    has_whole_rounds: bool = False
    is_uniform: bool = False
    has_equal_stages: bool = False
    has_equal_chunks: bool = False

    def __post_init__(self) -> None:
        """Bring collections into a canonical order, so that equal limits compare equal."""
        object.__setattr__(self, "excluded", _sort(set(self.excluded)))
        object.__setattr__(self, "exclusive", tuple(sorted({_sort_pair(*pair) for pair in self.exclusive})))
        least: dict[PlanDimension, int] = {}
        for dimension, degree in self.degrees_max:
            if dimension not in DEGREES:
                accepted = ", ".join(each.value for each in DEGREES)
                raise ValueError(f"degrees_max: {dimension.value} has no degree; accepted: {accepted}")
            if degree < 1:
                raise ValueError(f"degrees_max: {dimension.value} is {degree}; it must be at least 1")
            least[dimension] = min(degree, least.get(dimension, degree))
        object.__setattr__(self, "degrees_max", tuple((each, least[each]) for each in _sort(least)))
        for name in ("micro_batches_min", "micro_batches_max", "replica_samples_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.micro_batches_max is not None and self.micro_batches_max < self.micro_batches_min:
            raise ValueError(
                f"micro_batches_max is {self.micro_batches_max}; it must be at least "
                f"micro_batches_min, {self.micro_batches_min}"
            )

    @classmethod
    def allow_only(cls, dimensions: Iterable[PlanDimension]) -> PlanLimits:
        """Return limits that exclude all other dimensions.

        A dimension brings those that it cannot do without: a sharding brings data parallelism, a schedule brings
        pipelines, sequence sharding brings tensor parallelism, `offload_parameters` brings `offload`, and
        `offload_activations` brings `recompute`. If no sharding is listed, `ddp` is allowed, and if no
        schedule is, `1f1b` is.
        """
        allowed = set(dimensions)
        allowed |= {needed for each in allowed for needed in _REQUIRED.get(each, ())}
        if not allowed.intersection(SHARDINGS):
            allowed.add(PlanDimension.DDP)
        if not allowed.intersection(SCHEDULES.values()):
            allowed.add(PlanDimension.ONE_F_ONE_B)
        return cls(excluded=tuple(set(PlanDimension) - allowed))

    @property
    def key(self) -> str:
        """Short digest of the limits; empty if there are none."""
        defaults = PlanLimits()
        given = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != getattr(defaults, each.name)
        }
        return sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16] if given else ""

    def allows(self, dimension: PlanDimension) -> bool:
        return dimension not in self.excluded

    def compute_degree_max(self, dimension: PlanDimension, largest: int) -> int:
        """Return the largest degree that is allowed, at most `largest`."""
        return min(dict(self.degrees_max).get(dimension, largest), largest) if self.allows(dimension) else 1

    def is_paired(self, dimension: PlanDimension) -> bool:
        """Return whether the dimension is in one of the exclusive pairs."""
        return any(dimension in pair for pair in self.exclusive)

    def may_forbid(self, dimension: PlanDimension) -> bool:
        """Return whether there are plans that may not use the dimension, or not at every degree."""
        return not self.allows(dimension) or dimension in dict(self.degrees_max) or self.is_paired(dimension)

    def allows_micro_batches(self, micro_batches: int, stages: int) -> bool:
        """Return whether a step may have `micro_batches` micro-batches in a pipeline of `stages` devices."""
        return not self.find_micro_batch_violation(micro_batches, stages)

    def find_micro_batch_violation(self, micro_batches: int, stages: int) -> str:
        """Return why a step may not have that many micro-batches; empty if it may."""
        found = f"micro_batches is {micro_batches}; the limits "
        if micro_batches < self.micro_batches_min:
            return f"{found}require at least {self.micro_batches_min}"
        if self.micro_batches_max is not None and micro_batches > self.micro_batches_max:
            return f"{found}allow at most {self.micro_batches_max}"
        if self.fills_pipeline and micro_batches < stages:
            return f"{found}require at least one per pipeline stage, {stages}"
        if self.has_whole_rounds and micro_batches % stages:
            return f"{found}require a multiple of the {stages} pipeline stages"
        return ""

    def combine(self, other: PlanLimits) -> PlanLimits:
        """Return the limits that only plans within both keep."""
        return PlanLimits(
            excluded=(*self.excluded, *other.excluded),
            exclusive=(*self.exclusive, *other.exclusive),
            degrees_max=(*self.degrees_max, *other.degrees_max),
            micro_batches_min=max(self.micro_batches_min, other.micro_batches_min),
            micro_batches_max=_find_smaller(self.micro_batches_max, other.micro_batches_max),
            replica_samples_max=_find_smaller(self.replica_samples_max, other.replica_samples_max),
            fills_pipeline=self.fills_pipeline or other.fills_pipeline,
            has_whole_rounds=self.has_whole_rounds or other.has_whole_rounds,
            is_uniform=self.is_uniform or other.is_uniform,
            has_equal_stages=self.has_equal_stages or other.has_equal_stages,
            has_equal_chunks=self.has_equal_chunks or other.has_equal_chunks,
        )

    def find_violation(self, plan: ParallelPlan) -> str:
        """Return the first limit that `plan` breaks, with the value and what is allowed; empty if it keeps all."""
        return next(self._list_violations(plan), "")

    def list_single_limits(self) -> Iterator[tuple[str, PlanLimits]]:
        """Yield each limit on its own, with the change that lifts it. Combined, they are these limits."""
        for dimension in self.excluded:
            yield f"allow {dimension.value}", PlanLimits(excluded=(dimension,))
        for dimension, degree in self.degrees_max:
            change = f"allow a degree of {dimension.value} above {degree}"
            yield change, PlanLimits(degrees_max=((dimension, degree),))
        for one, two in self.exclusive:
            yield f"allow {one.value} with {two.value}", PlanLimits(exclusive=((one, two),))
        for change, name, default in _SCALAR_CHANGES:
            value = getattr(self, name)
            if value != default:
                yield change.format(value=value), replace(NO_LIMITS, **{name: value})

    def _list_violations(self, plan: ParallelPlan) -> Iterator[str]:
        stages, used = plan.pipeline_devices, list_pipeline_dimensions(plan)
        violation = self.find_micro_batch_violation(plan.micro_batches, stages)
        if violation:
            yield violation
        strategies = dict.fromkeys(
            replace(strategy, layers=1) for stage in plan.stages for strategy in stage.strategies
        )
        yield from self._list_excluded(used)
        for strategy in strategies:
            dimensions = list_strategy_dimensions(strategy)
            yield from self._list_excluded(dimensions)
            both = {*used, *dimensions}
            for one, two in self.exclusive:
                if one in both and two in both:
                    yield f"{one.value} and {two.value} are used together; the limits allow only one of them"
            yield from self._list_large_degrees(plan, strategy)
        if self.is_uniform and len(strategies) > 1:
            yield f"the plan has {len(strategies)} different strategies; the limits require one for all layers"
        lengths = sorted({stage.last_layer - stage.first_layer + 1 for stage in plan.stages})
        is_interleaved = plan.schedule.name is ScheduleName.INTERLEAVED
        if len(lengths) > 1 and (self.has_equal_stages or (self.has_equal_chunks and is_interleaved)):
            yield f"stages have {lengths} layers; the limits require the same number in all"

    def _list_excluded(self, used: Iterable[PlanDimension]) -> Iterator[str]:
        for dimension in used:
            if not self.allows(dimension):
                yield f"the plan uses {dimension.value}; the limits exclude it"

    def _list_large_degrees(self, plan: ParallelPlan, strategy: LayerStrategy) -> Iterator[str]:
        degrees = {
            PlanDimension.PIPELINE: plan.pipeline_devices,
            PlanDimension.TENSOR: strategy.tp,
            PlanDimension.DATA: strategy.dp,
            PlanDimension.ULYSSES: strategy.ulysses,
            PlanDimension.RING: strategy.ring,
            PlanDimension.EXPERT: strategy.ep,
            PlanDimension.INTERLEAVE: plan.schedule.interleave,
        }
        for dimension, largest in self.degrees_max:
            if degrees[dimension] > largest:
                yield f"the degree of {dimension.value} is {degrees[dimension]}; the limits allow at most {largest}"
        samples = plan.micro_batch_size // strategy.dp
        if self.replica_samples_max is not None and samples > self.replica_samples_max:
            yield (
                f"a micro-batch has {samples} samples on each replica; "
                f"the limits allow at most {self.replica_samples_max}"
            )


def list_pipeline_dimensions(plan: ParallelPlan) -> tuple[PlanDimension, ...]:
    """Return the dimensions that a plan uses as a pipeline; none for a single stage."""
    if plan.pipeline_devices == 1:
        return ()
    return PlanDimension.PIPELINE, SCHEDULES[plan.schedule.name]


def list_strategy_dimensions(strategy: LayerStrategy) -> tuple[PlanDimension, ...]:
    """Return the dimensions that a layer's strategy uses."""
    replicas = strategy.dp * strategy.ulysses * strategy.ring
    is_hybrid = strategy.zero == 3 and strategy.shard_group < replicas
    sharding = PlanDimension.HYBRID_SHARD if is_hybrid else SHARDINGS[strategy.zero]
    uses = {
        PlanDimension.DATA: strategy.dp > 1,
        sharding: replicas > 1,
        PlanDimension.TENSOR: strategy.tp > 1,
        PlanDimension.SEQUENCE_SHARDING: strategy.sequence_sharding,
        PlanDimension.ULYSSES: strategy.ulysses > 1,
        PlanDimension.RING: strategy.ring > 1,
        PlanDimension.EXPERT: strategy.ep > 1,
        PlanDimension.RECOMPUTE: strategy.recompute is Recompute.FULL,
        PlanDimension.SELECTIVE_RECOMPUTE: strategy.recompute is Recompute.SELECTIVE,
        PlanDimension.OFFLOAD: strategy.offload,
        PlanDimension.OFFLOAD_PARAMETERS: strategy.offload_parameters,
        PlanDimension.OFFLOAD_ACTIVATIONS: strategy.offload_activations,
    }
    return tuple(dimension for dimension, used in uses.items() if used)


_REQUIRED = {
    PlanDimension.ZERO1: (PlanDimension.DATA,),
    PlanDimension.ZERO2: (PlanDimension.DATA,),
    PlanDimension.DDP: (PlanDimension.DATA,),
    PlanDimension.FSDP: (PlanDimension.DATA,),
    PlanDimension.HYBRID_SHARD: (PlanDimension.DATA,),
    PlanDimension.EXPERT: (PlanDimension.DATA,),
    PlanDimension.SEQUENCE_SHARDING: (PlanDimension.TENSOR,),
    PlanDimension.OFFLOAD_PARAMETERS: (PlanDimension.OFFLOAD,),
    PlanDimension.OFFLOAD_ACTIVATIONS: (PlanDimension.RECOMPUTE,),
    PlanDimension.ONE_F_ONE_B: (PlanDimension.PIPELINE,),
    PlanDimension.INTERLEAVE: (PlanDimension.PIPELINE,),
    PlanDimension.GPIPE: (PlanDimension.PIPELINE,),
}

_SCALAR_CHANGES: tuple[tuple[str, str, Any], ...] = (
    ("allow fewer than {value} micro-batches", "micro_batches_min", 1),
    ("allow more than {value} micro-batches", "micro_batches_max", None),
    ("allow more than {value} samples per replica in a micro-batch", "replica_samples_max", None),
    ("allow fewer micro-batches than pipeline stages", "fills_pipeline", False),
    ("allow micro-batches that are no multiple of the pipeline stages", "has_whole_rounds", False),
    ("allow different strategies for different layers", "is_uniform", False),
    ("allow stages with different numbers of layers", "has_equal_stages", False),
    ("allow chunks with different numbers of layers", "has_equal_chunks", False),
)


def _sort(dimensions: Iterable[PlanDimension]) -> tuple[PlanDimension, ...]:
    return tuple(sorted(dimensions, key=list(PlanDimension).index))


def _sort_pair(one: PlanDimension, two: PlanDimension) -> tuple[PlanDimension, PlanDimension]:
    first, second = _sort((one, two))
    return first, second


def _find_smaller(one: int | None, two: int | None) -> int | None:
    given = [value for value in (one, two) if value is not None]
    return min(given, default=None)


NO_LIMITS = PlanLimits()
