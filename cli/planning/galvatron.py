"""Plans for a Galvatron profile under Galvatron's cost model: comparison with a given plan, and its tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.galvatron.comparison import compare_with_galvatron
from baselines.galvatron.strategy_space import MemoryLimitReading
from cli.inputs import input_errors_from, raise_input_error
from cli.output import format_duration, format_number, render_facts, render_table, stack
from cli.planning.plan_tables import format_optimality, format_pipeline, render_stages, summarize_plan
from cli.planning.request import MemoryReading

if TYPE_CHECKING:
    from rich.console import RenderableType


Json = dict[str, Any]


def solve_galvatron(folder: str, plan_file: str | None, reading: MemoryReading) -> Json:
    """Return our plan as JSON, with the profile in `galvatron` and the evaluation of `plan_file` in `given`.

    Raises:
        InputError: the folder or the plan is invalid.
    """
    if not Path(folder).is_dir():
        raise_input_error(
            f"--galvatron: {folder} is not a directory. It must contain a profile's JSON files and spec.json."
        )
    started_s = time.perf_counter()
    with input_errors_from(f"--galvatron {folder}"):
        answer = compare_with_galvatron(
            Path(folder), MemoryLimitReading(reading.value), Path(plan_file) if plan_file else None
        )
    took = {"search_time_s": time.perf_counter() - started_s, "candidates": answer.pop("candidates")}
    plans = {name: answer.pop(name) for name in ("infeasible", "constraint", "given") if name in answer}
    return {**answer.pop("ours", {}), **plans, **took, "galvatron": answer}


AnswerJson = Mapping[str, Any]


def render_galvatron_plans(answer: AnswerJson) -> RenderableType:
    """Return the profile, one line per plan under the same cost model, then our plan's stages."""
    from rich.text import Text

    case = answer["galvatron"]
    kept_back = " (Galvatron reserves the rest)" if case["memory_reading"] == "kept-back" else ""
    facts = {
        "profile": f"{case['model']} on {case['gpus']} GPUs, evaluated with Galvatron's cost model",
        "memory": f"{case['memory_mb_max']:,} MB of {format_number(case['memory_gb'])} GB a GPU may be used{kept_back}",
        "found": f"in {format_duration(answer['search_time_s'])}, {answer['candidates']:,} candidates",
    }
    if "infeasible" in answer:
        return stack(render_facts(facts))
    facts["proven"] = format_optimality(answer["optimality_gap"])
    rows = [_format_galvatron_row("ours", answer)]
    if "given" in answer:
        rows.append(_format_galvatron_row("given", answer["given"]))
        facts["ours is"] = f"{100 * (answer['given']['speed_up'] - 1):.2f}% faster than the given plan"
    heads = ["", "step", "samples/s", "fullest GPU", "changes", "embedding", "plan"]
    plans = render_table(rows, headers=heads, right_aligned=heads[1:5])
    return stack(render_facts(facts), Text(), plans, Text(), Text(format_pipeline(answer)), render_stages(answer))


def _format_galvatron_row(name: str, plan: AnswerJson) -> list[str]:
    """Format one plan. `changes` is the time of layout changes between layers, which Galvatron's step time omits."""
    judged = plan["evaluation"]
    return [
        name,
        f"{judged['judged_s']:.4g} s",
        f"{plan['samples_per_s']:,.2f}",
        f"{max(judged['memory_mb']):,} MB",
        format_duration(plan["micro_batches"] * judged["transition_s"]),
        plan["embedding"],
        summarize_plan(plan) if plan["fits"] else f"{summarize_plan(plan)} (does not fit)",
    ]
