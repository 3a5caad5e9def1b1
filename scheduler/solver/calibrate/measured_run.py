"""MeasuredRun: a training job that somebody timed, in the terms that the solver plans in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, ScheduleName, Stage
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import SolveRequest


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run on GPUs of one model. `plan` predicts nothing; `peak_bytes` of one GPU is 0 where nobody measured it."""

    model: ModelProfile
    shape: GpuShape
    plan: ParallelPlan
    iteration_time_s: float
    peak_bytes: int = 0

    def request(self, hardware: HardwareProfile) -> SolveRequest:
        """The question that `plan` answers, for `evaluate`."""
        return SolveRequest(self.model, (hardware,), self.shape, self.plan.global_batch)


def even_plan(
    strategy: LayerStrategy, *, layers: int, gpu: str, pipeline: int, interleave: int, micro_batches: int, samples: int
) -> ParallelPlan:
    """All `layers` under `strategy`, in `pipeline` x `interleave` stages as even as they go.

    `samples` is the micro-batch of one data-parallel replica. Its predictions are zero.
    """
    stages = pipeline * interleave
    borders = [number * layers // stages for number in range(stages + 1)]
    schedule = Schedule(ScheduleName.INTERLEAVED, interleave) if interleave > 1 else Schedule()
    return ParallelPlan(
        schedule=schedule,
        micro_batches=micro_batches,
        micro_batch_size=samples * strategy.dp,
        iteration_time_s=0.0,
        samples_per_s=0.0,
        peak_bytes_per_gpu=0,
        stages=tuple(
            Stage(first, end - 1, gpu, strategy.gpus, (replace(strategy, layers=end - first),))
            for first, end in pairwise(borders)
        ),
    )
