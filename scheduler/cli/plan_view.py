"""A parallel plan, in the contract's JSON form, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import gpus, number, share, size, span
from scheduler.cli.output import columns, facts, stacked
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json

if TYPE_CHECKING:
    from rich.console import RenderableType

PlanJson = Mapping[str, Any]
_DEGREES = {"tp": "tensor", "ulysses": "ulysses", "ring": "ring", "ep": "expert", "dp": "data"}
CONTRACT = frozenset(field.name for field in fields(ParallelPlan))
_ZERO = ("", "zero-1", "zero-2", "fsdp")


def plan_view(
    plan: PlanJson, *, memory_bytes: int | None = None, more: Mapping[str, str] | None = None
) -> RenderableType:
    """What the plan promises, then its stages. `memory_bytes` is the limit of one GPU, `more` further facts."""
    from rich.text import Text

    promises = {
        "step": f"{span(plan['iteration_time_s'])}, {number(plan['samples_per_s'], 2)} samples/s",
        "memory": memory_text(plan["peak_bytes_per_gpu"], memory_bytes),
        "pipeline": pipeline_text(plan),
        "proven within": share(plan["optimality_gap"]),
        **(more or {}),
    }
    stages = columns(
        _stage_rows(plan),
        heads=["stage", "layers", "GPUs", "strategy", "sharded", "recompute"],
        right=["stage"],
    )
    return stacked(facts(promises), Text(), stages)


def curve_view(points: Sequence[PlanJson], *, memory_bytes: int) -> RenderableType:
    """One line a number of GPUs: what each is worth beside the fewest that work, and why the others do not."""
    from rich.text import Text

    solved = [point for point in points if "infeasible" not in point]
    table = columns(
        (_curve_row(point, solved[0], memory_bytes) for point in solved),
        heads=["GPUs", "step", "samples/s", "speed-up", "a GPU", "memory", "plan"],
        right=["GPUs", "step", "samples/s", "speed-up", "a GPU", "memory"],
        empty="No plan fits.",
    )
    reasons = [Text(f"{point['shape']}: {point['infeasible']}") for point in points if "infeasible" in point]
    return stacked(table, *([Text(), *reasons] if reasons else []))


def _curve_row(point: PlanJson, first: PlanJson, memory_bytes: int) -> list[str]:
    plan = plan_from_json({key: value for key, value in point.items() if key in CONTRACT})
    gain = point["samples_per_s"] / first["samples_per_s"]
    return [
        str(point["gpus"]),
        span(point["iteration_time_s"]),
        number(point["samples_per_s"], 2),
        f"{gain:.2f}x",
        share(gain * first["gpus"] / point["gpus"]),
        share(point["peak_bytes_per_gpu"] / memory_bytes),
        plan.summary(),
    ]


def memory_text(peak_bytes: int, limit_bytes: int | None) -> str:
    if not peak_bytes:
        return "unknown"
    if not limit_bytes:
        return f"{size(peak_bytes)} a GPU"
    return f"{size(peak_bytes)} of {size(limit_bytes)} a GPU ({share(peak_bytes / limit_bytes)})"


def pipeline_text(plan: PlanJson) -> str:
    stages = len(plan["stages"])
    batches = f"{plan['micro_batches']} micro-batches of {plan['micro_batch_size']} samples"
    return f"{stages} stages, {plan['schedule']['name']}, {batches}" if stages > 1 else f"1 stage, {batches}"


def degrees_text(strategy: Mapping[str, Any]) -> str:
    """`tensor 2 x data 4`, or `1 GPU`."""
    used = [f"{name} {strategy[key]}" for key, name in _DEGREES.items() if strategy.get(key, 1) > 1]
    if strategy.get("sequence_sharding"):
        used.append("sequence-sharded")
    return " x ".join(used) or gpus(1)


def _stage_rows(plan: PlanJson) -> Iterator[list[str]]:
    for number_, stage in enumerate(plan["stages"]):
        first = stage["first_layer"]
        for strategy in stage["strategies"]:
            last = first + strategy["layers"] - 1
            yield [
                str(number_),
                f"{first}-{last}" if last > first else str(first),
                f"{stage['gpus']} x {stage['gpu']}",
                degrees_text(strategy),
                _sharding(strategy),
                str(strategy["recompute"]),
            ]
            first = last + 1


def _sharding(strategy: Mapping[str, Any]) -> str:
    kind = _ZERO[strategy["zero"]]
    return f"{kind} over {strategy['shard_group']}" if kind else "no"
