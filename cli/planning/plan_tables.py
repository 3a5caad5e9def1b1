"""A parallel plan, in the contract's JSON form with its inspection, as people read it.

A curve of plans over numbers of GPUs, as people read it.

The solution of a dumped request, which knows numbers and no names, as people read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cli.output import (
    format_bytes,
    format_duration,
    format_gpus,
    format_number,
    format_percent,
    render_facts,
    render_table,
    stack,
)
from cli.planning.stage_diagram import StageDiagram
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json

if TYPE_CHECKING:
    from rich.console import RenderableType


PlanJson = Mapping[str, Any]
Strategy = Mapping[str, Any]
_DEGREE_NAMES = {"tp": "tensor", "ulysses": "ulysses", "ring": "ring", "ep": "expert", "dp": "data"}
PLAN_FIELDS = frozenset(field.name for field in fields(ParallelPlan))
_SHARDING_NAMES = ("no", "zero-1", "zero-2", "fsdp")
_RANGES_SHOWN_MAX = 4


def render_plan(plan: PlanJson, *, shape: str) -> RenderableType:
    """What the plan promises, how its layers are spread, where the step goes, and what other plans would cost."""
    from rich.text import Text

    others = render_runners_up(plan)
    blank = Text()
    return stack(
        render_facts(_format_plan_facts(plan, shape)),
        blank,
        render_stages(plan),
        blank,
        StageDiagram(plan["inspection"], plan["iteration_time_s"]),
        *([blank, others] if others else []),
    )


def render_stages(plan: PlanJson) -> RenderableType:
    """One line for each strategy of each device of the pipeline."""
    offloads = any(strategy.get("offload") for stage in plan["stages"] for strategy in stage["strategies"])
    return render_table(
        ([*row[:-1], *(row[-1:] if offloads else ())] for row in _format_stage_rows(plan)),
        headers=["stage", "layers", "GPUs", "strategy", "sharded", "recompute", *(["offload"] if offloads else [])],
        right_aligned=["stage"],
    )


def render_runners_up(plan: PlanJson) -> RenderableType | None:
    """The next best plans with what they cost more; None where none were asked for."""
    whole = [_format_runner_up_row(plan["whole"], " (all GPUs)")] if plan["whole"] else []
    rows = [*whole, *(_format_runner_up_row(other, "") for other in plan["runners_up"])]
    heads = ["runner-up", "step", "slower by", "memory"]
    return render_table(rows, headers=heads, right_aligned=["step", "slower by", "memory"]) if rows else None


def summarize_plan(plan: PlanJson) -> str:
    """The plan in one short line."""
    return plan_from_json({"optimality_gap": 0.0, **plan}).summarize()


def format_optimality(gap: float) -> str:
    """What `optimality_gap` says of a plan."""
    if gap <= 1e-9:
        return "optimal: no plan is faster"
    return f"no plan is faster by more than {100 * gap:.2g}%"


def format_pipeline(plan: PlanJson) -> str:
    """`4 stages, 1f1b, 8 micro-batches of 2 samples`."""
    interleave = plan["schedule"].get("interleave", 1)
    stages = len(plan["stages"]) // interleave
    count = plan["micro_batches"]
    batches = f"{count} {'micro-batch' if count == 1 else 'micro-batches'} of {plan['micro_batch_size']} samples"
    if stages == 1:
        return f"1 stage, {batches}"
    chunks = f" with {interleave} chunks each" if interleave > 1 else ""
    return f"{stages} stages{chunks}, {plan['schedule']['name']}, {batches}"


def format_degrees(strategy: Strategy) -> str:
    """`tensor 2 x data 4`, or `1 GPU`."""
    used = [f"{name} {strategy[key]}" for key, name in _DEGREE_NAMES.items() if strategy.get(key, 1) > 1]
    if strategy.get("sequence_sharding"):
        used.append("sequence-sharded")
    return " x ".join(used) or format_gpus(1)


def format_layer_ranges(layers: Sequence[int]) -> str:
    """`0-7`, `0-3, 8`; of many runs the first two and the last."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    return ", ".join(shown if len(shown) <= _RANGES_SHOWN_MAX else [*shown[:2], "...", shown[-1]])


def _format_plan_facts(plan: PlanJson, shape: str) -> dict[str, str]:
    inspection = plan["inspection"]
    bubble = inspection["bubble_ratio"]
    promises = {
        "step": f"{format_duration(plan['iteration_time_s'])}, {format_number(plan['samples_per_s'], 2)} samples/s",
        "GPUs": shape,
        "pipeline": format_pipeline(plan),
        "memory": _format_memory(inspection["devices"]),
        "bubble": f"{format_percent(bubble)} of the step" if bubble > 1e-9 else "none",
        "utilisation": f"{format_percent(inspection['model_flops_utilization'])} of the GPUs' peak, by the FLOPs of the model",
        "proven": format_optimality(plan["optimality_gap"]),
        "found": f"in {format_duration(plan['search_time_s'])}, {plan['candidates']:,} candidates",
    }
    if "solver" in plan:
        bound = f"{plan['objective_s']:.6g} s a step before its fixed overhead, bound {plan['bound_s']:.6g} s"
        promises["found"] += f", by {plan['solver']}: {plan['status']}, {bound}"
    if plan["remark"]:
        promises["remark"] = plan["remark"]
    return promises


def _format_memory(devices: Sequence[Mapping[str, Any]]) -> str:
    """Of the GPU that is nearest to its limit."""
    fullest = max(devices, key=lambda device: float(device["memory_bytes"]) / device["memory_bytes_max"])
    need, limit = fullest["memory_bytes"], fullest["memory_bytes_max"]
    where = f" ({fullest['gpu']})" if len({device["gpu"] for device in devices}) > 1 else ""
    return f"{format_bytes(need)} of {format_bytes(limit)} a GPU{where} ({format_percent(need / limit)})"


def _format_stage_rows(plan: PlanJson) -> Iterator[list[str]]:
    devices = len(plan["stages"]) // plan["schedule"]["interleave"]
    for position in range(devices):
        stages = plan["stages"][position::devices]
        for at, (strategy, layers) in enumerate(_group_layers_by_strategy(stages)):
            yield [
                "" if at else str(position),
                format_layer_ranges(layers),
                "" if at else f"{stages[0]['gpus']} x {stages[0]['gpu']}",
                format_degrees(strategy),
                _format_sharding(strategy),
                str(strategy["recompute"]),
                "yes" if strategy.get("offload") else "no",
            ]


def _group_layers_by_strategy(stages: Sequence[Mapping[str, Any]]) -> list[tuple[Strategy, list[int]]]:
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


def _format_sharding(strategy: Strategy) -> str:
    kind = _SHARDING_NAMES[strategy["zero"]]
    return f"{kind} over {strategy['shard_group']}" if strategy["zero"] else kind


def _format_runner_up_row(other: PlanJson, note: str) -> list[str]:
    return [
        summarize_plan(other) + note,
        format_duration(other["iteration_time_s"]),
        f"+{100 * other['slower_ratio']:.2g}%"
        if other["slower_ratio"] < 0.1
        else f"+{100 * other['slower_ratio']:.0f}%",
        format_bytes(other["peak_bytes_per_gpu"]),
    ]


def render_curve(points: Sequence[PlanJson], *, memory_limit_bytes: int) -> RenderableType:
    """One line a number of GPUs: what each is worth beside the fewest that work, and why the others do not.

    A mark stands where fewer GPUs are at least as fast, so that more of them are wasted.
    """
    from rich.text import Text

    solved = [point for point in points if "infeasible" not in point]
    table = render_table(
        (_format_curve_row(point, solved[0], memory_limit_bytes) for point in solved),
        headers=["GPUs", "", "step", "samples/s", "speed-up", "a GPU", "memory", "plan"],
        right_aligned=["GPUs", "step", "samples/s", "speed-up", "a GPU", "memory"],
        empty="No plan fits.",
    )
    wasted = [point for point in solved if point["better_gpus"]]
    marks = [Text(f"! {format_wasted_gpus(wasted)}")] if wasted else []
    reasons = [Text(f"{point['shape']}: {point['infeasible']}") for point in points if "infeasible" in point]
    notes = [*marks, *reasons]
    return stack(table, *([Text(), *notes] if notes else []))


def format_wasted_gpus(wasted: Sequence[PlanJson]) -> str:
    """`fewer GPUs are at least as fast: 5 (4 do), 7 (6 do)`."""
    each = ", ".join(f"{point['gpus']} ({point['better_gpus']} do)" for point in wasted)
    return f"fewer GPUs are at least as fast: {each}"


def _format_curve_row(point: PlanJson, smallest: PlanJson, memory_limit_bytes: int) -> list[str]:
    gain = point["samples_per_s"] / smallest["samples_per_s"]
    return [
        str(point["gpus"]),
        "!" if point["better_gpus"] else "",
        format_duration(point["iteration_time_s"]),
        f"{point['samples_per_s']:,.2f}",
        f"{gain:.2f}x",
        format_percent(gain * smallest["gpus"] / point["gpus"]),
        format_percent(point["peak_bytes_per_gpu"] / memory_limit_bytes),
        summarize_plan(point),
    ]


def render_solution(answer: Mapping[str, Any]) -> RenderableType:
    """Objective and bound, then one line for each device of the pipeline."""
    from rich.text import Text

    told = {
        "objective": f"{answer['objective_s']:.9g} s",
        "proven bound": f"{answer['bound_s']:.9g} s ({format_optimality(answer['optimality_gap'])})",
        "solver": f"{answer['solver']}: {answer['status']}, in {format_duration(answer['search_time_s'])}",
        "instance": f"{answer['instance']} of 0 to {answer['instances'] - 1}",
        "micro-batches": str(answer["micro_batches"]),
    }
    rows = render_table(
        _format_device_rows(answer),
        headers=["device", "group", "layers", "strategies", "a micro-batch", "memory", "of"],
        right_aligned=["device", "group", "a micro-batch", "memory", "of"],
    )
    return stack(render_facts(told), Text(), rows)


def _format_device_rows(answer: Mapping[str, Any]) -> Iterator[list[str]]:
    devices, chunks = len(answer["order"]), list(pairwise(answer["borders"]))
    for device, group in enumerate(answer["order"]):
        layers = [layer for first, end in chunks[device::devices] for layer in range(first, end)]
        need, limit = answer["memory_bytes"][device], answer["capacity_bytes"][device]
        yield [
            str(device),
            str(group),
            format_layer_ranges(layers),
            ", ".join(map(str, dict.fromkeys(answer["choice"][layer] for layer in layers))),
            format_duration(answer["devices_s"][device]),
            format_bytes(need),
            f"{format_bytes(limit)} ({format_percent(need / limit) if limit else '-'})",
        ]
