"""A parallel plan, in the contract's JSON form with its inspection, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import gpus, number, share, size, span
from scheduler.cli.output import columns, facts, stacked
from scheduler.cli.plan_diagram import StageDiagram
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json

if TYPE_CHECKING:
    from rich.console import RenderableType

PlanJson = Mapping[str, Any]
Strategy = Mapping[str, Any]
_DEGREES = {"tp": "tensor", "ulysses": "ulysses", "ring": "ring", "ep": "expert", "dp": "data"}
CONTRACT = frozenset(field.name for field in fields(ParallelPlan))
_ZERO = ("no", "zero-1", "zero-2", "fsdp")
_RUNS_SHOWN = 4


def plan_view(plan: PlanJson, *, shape: str) -> RenderableType:
    """What the plan promises, how its layers are spread, where the step goes, and what other plans would cost."""
    from rich.text import Text

    others = runners_up_view(plan)
    blank = Text()
    return stacked(
        facts(_promises(plan, shape)),
        blank,
        stages_view(plan),
        blank,
        StageDiagram(plan["inspection"], plan["iteration_time_s"]),
        *([blank, others] if others else []),
    )


def stages_view(plan: PlanJson) -> RenderableType:
    """One line for each strategy of each device of the pipeline."""
    offloads = any(strategy.get("offload") for stage in plan["stages"] for strategy in stage["strategies"])
    return columns(
        ([*row[:-1], *(row[-1:] if offloads else ())] for row in _stage_rows(plan)),
        heads=["stage", "layers", "GPUs", "strategy", "sharded", "recompute", *(["offload"] if offloads else [])],
        right=["stage"],
    )


def runners_up_view(plan: PlanJson) -> RenderableType | None:
    """The next best plans with what they cost more; None where none were asked for."""
    whole = [_other_row(plan["whole"], " (all GPUs)")] if plan["whole"] else []
    rows = [*whole, *(_other_row(other, "") for other in plan["runners_up"])]
    heads = ["runner-up", "step", "slower by", "memory"]
    return columns(rows, heads=heads, right=["step", "slower by", "memory"]) if rows else None


def summary_of(plan: PlanJson) -> str:
    """The plan in one short line."""
    return plan_from_json({"optimality_gap": 0.0, **plan}).summary()


def proof_text(gap: float) -> str:
    """What `optimality_gap` says of a plan."""
    if gap <= 1e-9:
        return "optimal: no plan is faster"
    return f"no plan is faster by more than {100 * gap:.2g}%"


def pipeline_text(plan: PlanJson) -> str:
    """`4 stages, 1f1b, 8 micro-batches of 2 samples`."""
    interleave = plan["schedule"].get("interleave", 1)
    stages = len(plan["stages"]) // interleave
    count = plan["micro_batches"]
    batches = f"{count} {'micro-batch' if count == 1 else 'micro-batches'} of {plan['micro_batch_size']} samples"
    if stages == 1:
        return f"1 stage, {batches}"
    chunks = f" with {interleave} chunks each" if interleave > 1 else ""
    return f"{stages} stages{chunks}, {plan['schedule']['name']}, {batches}"


def degrees_text(strategy: Strategy) -> str:
    """`tensor 2 x data 4`, or `1 GPU`."""
    used = [f"{name} {strategy[key]}" for key, name in _DEGREES.items() if strategy.get(key, 1) > 1]
    if strategy.get("sequence_sharding"):
        used.append("sequence-sharded")
    return " x ".join(used) or gpus(1)


def runs_text(layers: Sequence[int]) -> str:
    """`0-7`, `0-3, 8`; of many runs the first two and the last."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    return ", ".join(shown if len(shown) <= _RUNS_SHOWN else [*shown[:2], "...", shown[-1]])


def _promises(plan: PlanJson, shape: str) -> dict[str, str]:
    inspection = plan["inspection"]
    bubble = inspection["bubble_ratio"]
    promises = {
        "step": f"{span(plan['iteration_time_s'])}, {number(plan['samples_per_s'], 2)} samples/s",
        "GPUs": shape,
        "pipeline": pipeline_text(plan),
        "memory": _memory_text(inspection["devices"]),
        "bubble": f"{share(bubble)} of the step" if bubble > 1e-9 else "none",
        "utilisation": f"{share(inspection['model_flops_utilization'])} of the GPUs' peak, by the FLOPs of the model",
        "proven": proof_text(plan["optimality_gap"]),
        "found": f"in {span(plan['search_time_s'])}, {plan['candidates']:,} candidates",
    }
    if "solver" in plan:
        bound = f"{plan['objective_s']:.6g} s a step before its fixed overhead, bound {plan['bound_s']:.6g} s"
        promises["found"] += f", by {plan['solver']}: {plan['status']}, {bound}"
    if plan["remark"]:
        promises["remark"] = plan["remark"]
    return promises


def _memory_text(devices: Sequence[Mapping[str, Any]]) -> str:
    """Of the GPU that is nearest to its limit."""
    fullest = max(devices, key=lambda device: float(device["memory_bytes"]) / device["memory_bytes_max"])
    need, limit = fullest["memory_bytes"], fullest["memory_bytes_max"]
    where = f" ({fullest['gpu']})" if len({device["gpu"] for device in devices}) > 1 else ""
    return f"{size(need)} of {size(limit)} a GPU{where} ({share(need / limit)})"


def _stage_rows(plan: PlanJson) -> Iterator[list[str]]:
    devices = len(plan["stages"]) // plan["schedule"]["interleave"]
    for position in range(devices):
        stages = plan["stages"][position::devices]
        for at, (strategy, layers) in enumerate(_layers_by_strategy(stages)):
            yield [
                "" if at else str(position),
                runs_text(layers),
                "" if at else f"{stages[0]['gpus']} x {stages[0]['gpu']}",
                degrees_text(strategy),
                _sharding(strategy),
                str(strategy["recompute"]),
                "yes" if strategy.get("offload") else "no",
            ]


def _layers_by_strategy(stages: Sequence[Mapping[str, Any]]) -> list[tuple[Strategy, list[int]]]:
    """The layers of one device under each of its strategies, in the order of their first layer."""
    found: list[tuple[Strategy, list[int]]] = []
    for stage in stages:
        first = stage["first_layer"]
        for run in stage["strategies"]:
            strategy = {name: value for name, value in run.items() if name != "layers"}
            layers = next((own for known, own in found if known == strategy), None)
            if layers is None:
                layers = []
                found.append((strategy, layers))
            layers += range(first, first + run["layers"])
            first += run["layers"]
    return found


def _sharding(strategy: Strategy) -> str:
    kind = _ZERO[strategy["zero"]]
    return f"{kind} over {strategy['shard_group']}" if strategy["zero"] else kind


def _other_row(other: PlanJson, note: str) -> list[str]:
    return [
        summary_of(other) + note,
        span(other["iteration_time_s"]),
        f"+{100 * other['slower_ratio']:.2g}%"
        if other["slower_ratio"] < 0.1
        else f"+{100 * other['slower_ratio']:.0f}%",
        size(other["peak_bytes_per_gpu"]),
    ]
