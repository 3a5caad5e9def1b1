"""Tables of plans, scaling curves and instance solutions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from scheduler.domain.parallel_plan import plan_from_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.solver.profiles.model_profile import ModelProfile

PlanJson = Mapping[str, Any]
Strategy = Mapping[str, Any]
_DEGREE_NAMES = {"tp": "tensor", "ulysses": "ulysses", "ring": "ring", "ep": "expert", "dp": "data"}
_SHARDING_NAMES = ("no", "zero-1", "zero-2", "fsdp")
_RANGES_SHOWN_MAX = 4
_SIZES = (("T", 1e12), ("B", 1e9), ("M", 1e6))


def render_plan(plan: PlanJson, *, shape: str, model: ModelProfile) -> RenderableType:
    """Return the model and a plan's predicted metrics, its stages, the diagram of its step, and the runner-up plans."""
    from rich.text import Text

    others = render_runners_up(plan)
    blank = Text()
    return stack(
        render_facts({"model": format_model(model), **_format_plan_facts(plan, shape)}),
        blank,
        render_stages(plan),
        blank,
        StageDiagram(plan["inspection"], plan["iteration_time_s"]),
        *([blank, others] if others else []),
    )


def render_stages(plan: PlanJson) -> RenderableType:
    """Return one line per strategy of each pipeline stage."""
    offloads = any(_list_offloads(strategy) for stage in plan["stages"] for strategy in stage["strategies"])
    return render_table(
        ([*row[:-1], *(row[-1:] if offloads else ())] for row in _format_stage_rows(plan)),
        headers=["stage", "layers", "GPUs", "strategy", "sharded", "recompute", *(["offload"] if offloads else [])],
        right_aligned=["stage"],
    )


def render_runners_up(plan: PlanJson) -> RenderableType | None:
    """Return the next best plans and how much slower they are, or None if there are none."""
    whole = [_format_runner_up_row(plan["whole"], " (all GPUs)")] if plan["whole"] else []
    rows = [*whole, *(_format_runner_up_row(other, "") for other in plan["runners_up"])]
    heads = ["runner-up", "step", "slower by", "memory"]
    return render_table(rows, headers=heads, right_aligned=["step", "slower by", "memory"]) if rows else None


def summarize_plan(plan: PlanJson) -> str:
    """Return the plan as one short line."""
    return plan_from_json({"optimality_gap": 0.0, **plan}).summarize()


def format_model(model: ModelProfile) -> str:
    """Format a model: `llama-2-7b, 6.74B parameters, 4,096 tokens per sample`."""
    count = next(
        (f"{model.parameters / size:.3g}{unit}" for unit, size in _SIZES if model.parameters >= size), "under 1M"
    )
    return f"{model.name}, {count} parameters, {model.sequence_length:,} tokens per sample"


def format_optimality(gap: float) -> str:
    """Format an optimality gap."""
    if gap <= 1e-9:
        return "optimal: by the cost model, no plan of the search space is faster"
    return f"by the cost model, no plan of the search space is more than {100 * gap:.2g}% faster"


def format_pipeline(plan: PlanJson) -> str:
    """Format the pipeline: `4 stages, 1f1b, 8 micro-batches of 2 samples`."""
    interleave = plan["schedule"].get("interleave", 1)
    stages = len(plan["stages"]) // interleave
    count = plan["micro_batches"]
    batches = f"{count} {'micro-batch' if count == 1 else 'micro-batches'} of {plan['micro_batch_size']} samples"
    if stages == 1:
        return f"1 stage, {batches}"
    chunks = f" with {interleave} chunks each" if interleave > 1 else ""
    return f"{stages} stages{chunks}, {plan['schedule']['name']}, {batches}"


def format_degrees(strategy: Strategy) -> str:
    """Format parallel degrees: `tensor 2 x data 4`, or `1 GPU`."""
    used = [f"{name} {strategy[key]}" for key, name in _DEGREE_NAMES.items() if strategy.get(key, 1) > 1]
    if strategy.get("sequence_sharding"):
        used.append("sequence-sharded")
    return " x ".join(used) or format_gpus(1)


def format_layer_ranges(layers: Sequence[int]) -> str:
    """Format layer numbers as ranges: `0-7`, `0-3, 8`. Many ranges are shortened to the first two and the last."""
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
        **_format_step_range(plan),
        "GPUs": shape,
        "pipeline": format_pipeline(plan),
        "memory": _format_memory(inspection["devices"]),
        "bubble": f"{format_percent(bubble)} of the step" if bubble > 1e-9 else "none",
        "utilization": f"{format_percent(inspection['model_flops_utilization'])} of peak FLOPS (model FLOPS)",
        "proven": format_optimality(plan["optimality_gap"]),
        "found": f"in {format_duration(plan['search_time_s'])}, {plan['candidates']:,} candidates",
    }
    if "solver" in plan:
        bound = f"{plan['objective_s']:.6g} s a step before its fixed overhead, bound {plan['bound_s']:.6g} s"
        promises["found"] += f", by {plan['solver']}: {plan['status']}, {bound}"
    if plan.get("simplest"):
        promises["simplest"] = _format_simplest(plan["simplest"])
    if plan["remark"]:
        promises["remark"] = plan["remark"]
    return promises


def _format_step_range(plan: PlanJson) -> dict[str, str]:
    """Return the interval of the step time; nothing if the error of a profile is unknown."""
    if plan["step_range_s"] is None:
        return {}
    least_s, most_s = plan["step_range_s"]
    return {"expected": f"{format_duration(least_s)} to {format_duration(most_s)} in 95% of cases"}


def _format_simplest(simplest: PlanJson) -> str:
    """Format the simplest plan: `tp4 dp2 · 8 micro-batches, 1 strategy, 1.2% slower`."""
    count, least = simplest["strategies"], simplest["strategies_min"]
    strategies = f"{count} different strategies" if count > 1 else "1 strategy for all layers"
    if simplest["slower_ratio"] <= 1e-9:
        found = f"this plan, {strategies}"
    else:
        found = f"{summarize_plan(simplest)}, {strategies}, {format_percent(simplest['slower_ratio'])} slower"
    return found if least == count else f"{found}; at least {least} are needed"


def _format_memory(devices: Sequence[Mapping[str, Any]]) -> str:
    """Format the memory of the GPU that is nearest to its limit."""
    fullest = max(devices, key=lambda device: float(device["memory_bytes"]) / device["memory_bytes_max"])
    need, limit = fullest["memory_bytes"], fullest["memory_bytes_max"]
    where = f" ({fullest['gpu']})" if len({device["gpu"] for device in devices}) > 1 else ""
    text = f"{format_bytes(need)} of {format_bytes(limit)} per GPU{where} ({format_percent(need / limit)})"
    offloading = max(devices, key=lambda device: int(device["host_bytes"]))
    if not offloading["host_bytes"]:
        return text
    most = offloading["host_bytes_max"]
    return f"{text}, {format_bytes(offloading['host_bytes'])}{f' of {format_bytes(most)}' if most else ''} on the host"


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
                ", ".join(_list_offloads(strategy)) or "no",
            ]


def _list_offloads(strategy: Mapping[str, Any]) -> list[str]:
    names = {"offload": "optimizer", "offload_parameters": "parameters", "offload_activations": "activations"}
    return [name for field, name in names.items() if strategy.get(field)]


def _group_layers_by_strategy(stages: Sequence[Mapping[str, Any]]) -> list[tuple[Strategy, list[int]]]:
    """Group the layers of one stage by strategy, in the order of the first layer of each group."""
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
    """Return one line per feasible number of GPUs, with its speed-up over the smallest, and the infeasible numbers.

    A `!` marks a number of GPUs for which fewer GPUs are at least as fast.
    """
    from rich.text import Text

    solved = [point for point in points if "infeasible" not in point]
    table = render_table(
        (_format_curve_row(point, solved[0], memory_limit_bytes) for point in solved),
        headers=["GPUs", "", "step", "samples/s", "speed-up", "per GPU", "memory", "plan"],
        right_aligned=["GPUs", "step", "samples/s", "speed-up", "per GPU", "memory"],
        empty="No plan is feasible.",
    )
    wasted = [point for point in solved if point["better_gpus"]]
    marks = [Text(f"! {format_wasted_gpus(wasted)}")] if wasted else []
    reasons = [Text(f"{point['shape']}: {point['infeasible']}") for point in points if "infeasible" in point]
    notes = [*marks, *reasons]
    return stack(table, *([Text(), *notes] if notes else []))


def format_wasted_gpus(wasted: Sequence[PlanJson]) -> str:
    """Format wasted GPUs: `fewer GPUs are at least as fast: 4 instead of 5, 6 instead of 7`."""
    pairs = ", ".join(f"{point['better_gpus']} instead of {point['gpus']}" for point in wasted)
    return f"fewer GPUs are at least as fast: {pairs}"


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
    """Return objective and bound, then one line per device of the pipeline."""
    from rich.text import Text

    facts = {
        "objective": f"{answer['objective_s']:.9g} s",
        "proven bound": f"{answer['bound_s']:.9g} s ({format_optimality(answer['optimality_gap'])})",
        "solver": f"{answer['solver']}: {answer['status']}, in {format_duration(answer['search_time_s'])}",
        "instance": f"{answer['instance']} of 0 to {answer['instances'] - 1}",
        "micro-batches": str(answer["micro_batches"]),
    }
    rows = render_table(
        _format_device_rows(answer),
        headers=["device", "group", "layers", "strategies", "per micro-batch", "memory", "limit"],
        right_aligned=["device", "group", "per micro-batch", "memory", "limit"],
    )
    return stack(render_facts(facts), Text(), rows)


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
