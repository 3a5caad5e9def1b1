"""Plans under Galvatron's cost model, ours and a given one, as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import number, share, span
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
    rows = [_row("ours", answer, case["memory_mb_max"])]
    if "given" in answer:
        rows.append(_row("given", answer["given"], case["memory_mb_max"]))
        told["ours is"] = f"{answer['given']['speed_up']:.3f} times as fast as the given plan"
    plans = columns(
        rows,
        heads=["", "step", "samples/s", "fullest GPU", "changes", "plan"],
        right=["step", "samples/s", "fullest GPU", "changes"],
    )
    return stacked(facts(told), Text(), plans, Text(), Text(pipeline_text(answer)), stages_view(answer))


def _row(name: str, plan: Json, memory_mb_max: int) -> list[str]:
    """`changes` is the time of changing layouts between layers, which Galvatron's step does not count."""
    judged = plan["evaluation"]
    fullest = max(judged["memory_mb"])
    fits = "" if plan["fits"] else ", does not fit"
    return [
        name,
        span(judged["judged_s"]),
        f"{plan['samples_per_s']:,.2f}",
        f"{fullest:,} MB ({share(fullest / memory_mb_max)}{fits})",
        span(plan["micro_batches"] * judged["transition_s"]),
        f"{summary_of(plan)}, embedding {plan['embedding']}",
    ]
