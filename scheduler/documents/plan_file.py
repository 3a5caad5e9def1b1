"""A plan file: a parallel plan that a user wrote, or that `ebbtide plan -o json` printed."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from scheduler.documents.document import Document, Text, invalid_field, parse_document
from scheduler.domain.parallel_plan import (
    LayerStrategy,
    ParallelPlan,
    Recompute,
    Schedule,
    ScheduleName,
    Stage,
)

COUNT_MAX = 1_000_000
Count = Annotated[int, Field(strict=True, ge=1, le=COUNT_MAX)]


class StrategyDocument(Document):
    """Parallelism of consecutive layers. What is absent is not used."""

    layers: Count
    tp: Count = 1
    sequence_sharding: bool = False
    dp: Count = 1
    zero: Annotated[int, Field(strict=True, ge=0, le=3)] = 0
    shard_group: Count | None = None
    ulysses: Count = 1
    ring: Count = 1
    ep: Count = 1
    recompute: Recompute = Recompute.NONE
    offload: bool = False
    offload_parameters: bool = False
    offload_activations: bool = False


class StageDocument(Document):
    """Consecutive layers on one group of GPUs. Layers follow those of the stage before."""

    strategies: Annotated[list[StrategyDocument], Field(min_length=1)]
    gpu: Text = ""
    gpus: Count | None = None
    first_layer: Annotated[int, Field(strict=True, ge=0)] | None = None
    last_layer: Annotated[int, Field(strict=True, ge=0)] | None = None


class ScheduleDocument(Document):
    name: ScheduleName = ScheduleName.ONE_F_ONE_B
    interleave: Count = 1


class PlanFileDocument(Document):
    """A plan without its predictions."""

    micro_batches: Count
    micro_batch_size: Count
    stages: Annotated[list[StageDocument], Field(min_length=1)]
    schedule: ScheduleDocument = Field(default_factory=ScheduleDocument)

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        for number, stage in enumerate(self.stages):
            widths = {run.tp * run.dp * run.ulysses * run.ring for run in stage.strategies}
            if stage.gpus is not None:
                widths.add(stage.gpus)
            if len(widths) > 1:
                allowed = "strategies with one product of tp, dp, ulysses and ring, which is gpus of the stage"
                raise invalid_field(f"stages.{number}.gpus", sorted(widths), allowed)
        return self


_PRINTED_FIELDS = frozenset(
    {
        "iteration_time_s",
        "samples_per_s",
        "peak_bytes_per_gpu",
        "peak_bytes_by_model",
        "terms",
        "optimality_gap",
        "inspection",
        "runners_up",
        "simplest",
        "step_range_s",
        "whole",
        "remark",
        "search_time_s",
        "candidates",
        "estimated",
        "slower_ratio",
    }
)
"""Fields that `ebbtide plan -o json` prints besides those of a plan file."""


def parse_plan_file(document: object, *, gpu: str) -> ParallelPlan:
    """Parse a plan. Predictions and other fields that `ebbtide plan -o json` prints are ignored, and 0 in the result.

    Args:
        gpu: GPU model of stages that name none.

    Raises:
        InvalidDocumentError: fields are invalid. The message names each with its value and the allowed values.
    """
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if name not in _PRINTED_FIELDS}
    parsed = parse_document(PlanFileDocument, document)
    stages, first = [], 0
    for stage in parsed.stages:
        strategies = tuple(_to_strategy(run) for run in stage.strategies)
        count = sum(run.layers for run in strategies)
        begin = first if stage.first_layer is None else stage.first_layer
        end = begin + count - 1 if stage.last_layer is None else stage.last_layer
        stages.append(Stage(begin, end, stage.gpu or gpu, strategies[0].gpus, strategies))
        first = end + 1
    schedule = Schedule(parsed.schedule.name, parsed.schedule.interleave)
    return ParallelPlan(schedule, parsed.micro_batches, parsed.micro_batch_size, 0.0, 0.0, 0, tuple(stages))


def _to_strategy(document: StrategyDocument) -> LayerStrategy:
    replicas = document.dp * document.ulysses * document.ring
    return LayerStrategy(
        layers=document.layers,
        tp=document.tp,
        sequence_sharding=document.sequence_sharding,
        dp=document.dp,
        zero=document.zero,
        shard_group=document.shard_group or (replicas if document.zero else 1),
        ulysses=document.ulysses,
        ring=document.ring,
        ep=document.ep,
        recompute=document.recompute,
        offload=document.offload,
        offload_parameters=document.offload_parameters,
        offload_activations=document.offload_activations,
    )
