"""The reference trainer's GPT in the solver's terms, and its measured steps as runs that profiles can be fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import ParallelPlan, Stage
from scheduler.profiling.tasks import GptShape, StepTask
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.hardware_profile import Precision
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.profiles.transformer import build_transformer_profile

_FFN_RATIO = 4
_RESIDUAL_BYTES = 4
"""Bytes per token and hidden value that an fp32 residual stream keeps beyond a bf16 one: two inputs of norms."""

_RESIDUAL_TRAFFIC = 16
"""Bytes that it moves beyond a bf16 one: norms and sums read and write 4 bytes, and casts for products 4 + 2."""


def build_reference_profile(shape: GptShape, precision: Precision) -> ModelProfile:
    """Return the profile of a GPT as the reference trainer runs it at this precision.

    In half precision, products and attention run under autocast, and the residual stream stays in fp32.
    """
    model = build_transformer_profile(
        f"gpt-{shape.layers}x{shape.hidden}",
        Architecture(
            family=Family.DECODER,
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            ffn=_FFN_RATIO * shape.hidden,
            sequence_length=shape.sequence,
            vocabulary=shape.vocabulary,
            positions=shape.sequence,
            biases=True,
        ),
    )
    if precision is Precision.FP32:
        return model
    values = shape.sequence * shape.hidden
    layers = tuple(
        replace(
            run,
            replicated_activation_bytes_per_sample=run.replicated_activation_bytes_per_sample
            + _RESIDUAL_BYTES * values,
            traffic_bytes_per_sample=run.traffic_bytes_per_sample + _RESIDUAL_TRAFFIC * values,
            boundary_bytes_per_sample=2 * run.boundary_bytes_per_sample,
        )
        for run in model.layers
    )
    return replace(model, layers=layers)


def build_measured_run(
    task: StepTask, figures: Mapping[str, float], *, gpu: str, ranks: int, precision: Precision, peak_bytes: int = 0
) -> MeasuredRun:
    """Return the measured step on `ranks` devices of one node, whose profile is named `gpu`."""
    return MeasuredRun(
        model=build_reference_profile(task.shape, precision),
        shape=GpuShape((GpuGroup(gpu, 1, ranks),)),
        plan=rename_gpu(task.plan, gpu),
        iteration_time_s=figures["step_s"],
        peak_bytes=peak_bytes,
    )


def rename_gpu(plan: ParallelPlan, gpu: str) -> ParallelPlan:
    """Return the plan on GPUs of this name."""
    stages: tuple[Stage, ...] = tuple(replace(stage, gpu=gpu) for stage in plan.stages)
    return replace(plan, stages=stages)
