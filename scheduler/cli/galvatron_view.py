"""Plans under Galvatron's cost model, ours and a given one, as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import number, span
from scheduler.cli.output import columns, facts, stacked
from scheduler.cli.plan_view import pipeline_text, proof_text, stages_view, summary_of

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = Mapping[str, Any]


def galvatron_view(answer: Json) -> RenderableType:
    """The profile, one line a plan under the same yardstick, then how ours spreads the layers."""
    from rich.text import Text

    case = answer["galvatron"]
    kept_back = " (the rest is kept back, as Galvatron does)" if case["memory_reading"] == "kept-back" else ""
    told = {
        "profile": f"{case['model']} on {case['gpus']} GPUs, judged by Galvatron's cost model",
        "memory": f"{case['memory_mb_max']:,} MB of {number(case['memory_gb'])} GB a GPU may be used{kept_back}",
        "found": f"in {span(answer['search_time_s'])}, {answer['candidates']:,} candidates",
    }
    if "infeasible" in answer:
        return stacked(facts(told))
    told["proven"] = proof_text(answer["optimality_gap"])
    rows = [_row("ours", answer)]
    if "given" in answer:
        rows.append(_row("given", answer["given"]))
        told["ours is"] = f"{100 * (answer['given']['speed_up'] - 1):.2f}% faster than the given plan"
    heads = ["", "step", "samples/s", "fullest GPU", "changes", "embedding", "plan"]
    plans = columns(rows, heads=heads, right=heads[1:5])
    return stacked(facts(told), Text(), plans, Text(), Text(pipeline_text(answer)), stages_view(answer))


def _row(name: str, plan: Json) -> list[str]:
    """`changes` is the time of changing layouts between layers, which Galvatron's step does not count."""
    judged = plan["evaluation"]
    return [
        name,
        f"{judged['judged_s']:.4g} s",
        f"{plan['samples_per_s']:,.2f}",
        f"{max(judged['memory_mb']):,} MB",
        span(plan["micro_batches"] * judged["transition_s"]),
        plan["embedding"],
        summary_of(plan) if plan["fits"] else f"{summary_of(plan)} (does not fit)",
    ]
