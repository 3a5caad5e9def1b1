"""ParallelPlan: how a job is parallelised on one GpuShape, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Recompute(StrEnum):
    """Activations that the backward pass recomputes instead of storing them."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class ScheduleName(StrEnum):
    """Order of the micro-batches in the pipeline."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"


@dataclass(frozen=True, slots=True)
class Schedule:
    name: ScheduleName = ScheduleName.ONE_F_ONE_B
    interleave: int = 1


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """Parallelism of `layers` consecutive layers on the GPUs of their stage.

    The product tp x dp x ulysses x ring is the number of GPUs of the stage. `zero` 0 is plain data parallelism (DDP); 1
    to 3 shard optimizer state, gradients and parameters over `shard_group` replicas (3 is FSDP).

    `offload` keeps optimizer state in host memory. `offload_parameters` keeps parameters and gradients there as well,
    and streams them to the GPU layer by layer; it needs `offload`. `offload_activations` keeps the inputs of layers
    there until the backward pass; it needs full recomputation.
    """

    layers: int
    tp: int = 1
    sequence_sharding: bool = False
    dp: int = 1
    zero: int = 0
    shard_group: int = 1
    ulysses: int = 1
    ring: int = 1
    ep: int = 1
    recompute: Recompute = Recompute.NONE
    offload: bool = False
    offload_parameters: bool = False
    offload_activations: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.dp * self.ulysses * self.ring


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: layers `first_layer` to `last_layer`, both included, on `gpus` GPUs of one model."""

    first_layer: int
    last_layer: int
    gpu: str
    gpus: int
    strategies: tuple[LayerStrategy, ...]


STEP_TERMS = ("compute", "node_links", "network", "experts", "optimizer", "fixed")
"""Causes of a step's time, each with a physical constant of its own that a profile may have wrong.

They are kernels, collectives and hand-overs within a node and across nodes, exchange of experts' tokens, the optimizer
step with changes of layout, and the overhead of an iteration.
"""


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """A complete plan. Times are the cost model's predictions for one optimizer step.

    `micro_batch_size` counts samples over all data-parallel replicas together, so that `micro_batches *
    micro_batch_size` is the global batch. `optimality_gap` is the largest possible speedup of any other plan, as a
    fraction. `peak_bytes_by_model` has the predicted peak on each GPU model of a mixed plan, sorted by model. It is
    empty for a plan on one model. `profile_time_s` is the iteration time by the GPU profiles alone, without learned
    constants, and `terms` are its shares by cause, in the order of STEP_TERMS. They are 0 and empty for a plan that the
    cost model did not predict, and not part of plan.json.
    """

    schedule: Schedule
    micro_batches: int
    micro_batch_size: int
    iteration_time_s: float
    samples_per_s: float
    peak_bytes_per_gpu: int
    stages: tuple[Stage, ...]
    optimality_gap: float = 0.0
    peak_bytes_by_model: tuple[tuple[str, int], ...] = ()
    terms: tuple[float, ...] = field(default=(), compare=False)
    profile_time_s: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a parallel plan needs at least one stage")
        for stage in self.stages:
            for strategy in stage.strategies:
                if strategy.gpus != stage.gpus:
                    raise ValueError(
                        f"stage of layers {stage.first_layer}-{stage.last_layer} has {stage.gpus} GPUs, "
                        f"but its strategy needs {strategy.gpus}"
                    )

    @property
    def pipeline_devices(self) -> int:
        """Number of GPU groups in the pipeline. Stage k runs on group k mod `pipeline_devices`."""
        return max(1, len(self.stages) // max(1, self.schedule.interleave))

    @property
    def world_size(self) -> int:
        return sum(stage.gpus for stage in self.stages[: self.pipeline_devices])

    @property
    def global_batch(self) -> int:
        return self.micro_batches * self.micro_batch_size

    @property
    def is_mixed(self) -> bool:
        """Whether the plan uses GPUs of several models."""
        return any(stage.gpu != self.stages[0].gpu for stage in self.stages)

    @property
    def is_replicated_mix(self) -> bool:
        """Whether all stages hold the same layers: replicas on GPUs of several models, of a job without a model."""
        return len(self.stages) > 1 and self.stages[1].first_layer == self.stages[0].first_layer

    @property
    def layers(self) -> int:
        """Number of layers, without embedding and head."""
        return self.stages[-1].last_layer + 1

    def peak_bytes_on(self, gpu: str) -> int:
        """Return the predicted peak memory of a GPU of this model."""
        return dict(self.peak_bytes_by_model).get(gpu, self.peak_bytes_per_gpu)

    def is_equivalent_to(self, other: ParallelPlan) -> bool:
        """Return whether workers do the same under both plans. Predictions may differ."""
        own, others = (
            (plan.schedule, plan.micro_batches, plan.micro_batch_size, plan.stages) for plan in (self, other)
        )
        return own == others

    def summarize(self) -> str:
        """Return one short line, for example `pp2 · tp2 dp2 fsdp · 8 micro-batches`."""
        first = self.stages[0].strategies[0]
        degrees = {
            "tp": first.tp,
            "ulysses": first.ulysses,
            "ring": first.ring,
            "ep": first.ep,
            "dp": self.world_size if self.is_replicated_mix else first.dp,
        }
        spread = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "dp1"
        sharding = ("", " zero1", " zero2", " fsdp")[first.zero]
        recompute = "" if first.recompute is Recompute.NONE else f" recompute-{first.recompute}"
        chunks = f"x{self.schedule.interleave}" if self.schedule.interleave > 1 else ""
        is_pipeline = self.pipeline_devices > 1 and not self.is_replicated_mix
        pipeline = f"pp{self.pipeline_devices}{chunks} · " if is_pipeline else ""
        batches = "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        return f"{pipeline}{spread}{sharding}{recompute} · {batches}"


def plan_to_json(plan: ParallelPlan) -> dict[str, Any]:
    """Return the plan as plain JSON values, the contract of plan.json and of the API.

    Fields that agents and scripts of older releases do not know are left out where a plan does not use them.
    """
    document = asdict(plan)
    del document["terms"], document["profile_time_s"]
    for strategy in (strategy for stage in document["stages"] for strategy in stage["strategies"]):
        for name in _STREAMED_FIELDS:
            if not strategy[name]:
                del strategy[name]
    if not plan.peak_bytes_by_model:
        del document["peak_bytes_by_model"]
    return document


def plan_from_json(document: Mapping[str, Any]) -> ParallelPlan:
    """Parse a plan that `plan_to_json` wrote.

    Raises:
        ValueError: a field is missing, of another type, or contradicts another field. The message names it.
    """
    try:
        stages = tuple(
            Stage(**{**stage, "strategies": tuple(_strategy_from_json(item) for item in stage["strategies"])})
            for stage in document["stages"]
        )
        schedule = Schedule(ScheduleName(document["schedule"]["name"]), int(document["schedule"]["interleave"]))
        rest = {key: document[key] for key in _SCALAR_FIELDS}
        peaks = tuple((str(gpu), int(peak)) for gpu, peak in document.get("peak_bytes_by_model", ()))
        return ParallelPlan(schedule=schedule, stages=stages, peak_bytes_by_model=peaks, **rest)
    except KeyError as error:
        raise ValueError(f"plan: field {error} is missing") from None
    except TypeError as error:
        raise ValueError(f"plan: {error}") from None


_STREAMED_FIELDS = ("offload_parameters", "offload_activations")
_SCALAR_FIELDS = (
    "micro_batches",
    "micro_batch_size",
    "iteration_time_s",
    "samples_per_s",
    "peak_bytes_per_gpu",
    "optimality_gap",
)


def _strategy_from_json(document: Mapping[str, Any]) -> LayerStrategy:
    return LayerStrategy(**{**document, "recompute": Recompute(document["recompute"])})
