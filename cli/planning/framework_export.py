"""`ebbtide plan --for NAME`: the plan in a framework's words, and what the framework's limits cost."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cli.inputs import raise_input_error
from cli.output import format_percent, stack
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json, plan_to_json
from scheduler.plan_export.framework import Framework
from scheduler.plan_export.frameworks import find_framework
from scheduler.plan_export.placeholders import fill_args
from scheduler.solver.nearest_plan import find_nearest_plan
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import solve_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cli.planning.request import PlanQuery

Json = dict[str, Any]

_FASTER_RATIO_MIN = 1e-3
"""Smallest gain of a plan that the framework cannot express which is worth mentioning."""


def parse_framework(name: str | None) -> Framework | None:
    """Return the framework of `--for`. Raises InputError if there is none of this name."""
    if name is None:
        return None
    try:
        return find_framework(name)
    except ValueError as error:
        raise_input_error(f"--for: {error}")


def export_answer(answer: Mapping[str, Any], framework: Framework, query: PlanQuery, *, tolerance: float) -> Json:
    """Return the plan of an answer in the framework's words.

    `faster` is the fastest plan that the framework cannot express, with the reason; None if it can express the fastest.
    """
    plan = plan_from_json({"optimality_gap": 0.0, **answer})
    request = replace(query.build_request(query.shapes[0]), limits=query.limits)
    exported = framework.export(plan)
    return {
        "framework": framework.name,
        "args": list(exported.args),
        "file": None if exported.file is None else {"name": exported.file.name, "text": exported.file.text},
        "faster": _find_faster_plan(plan, framework, request, tolerance),
    }


def find_nearest_answer(answer: Mapping[str, Any], query: PlanQuery) -> Json | None:
    """Return the plan nearest to that of an answer which the query's framework can express, None if there is none."""
    gpu = query.hardware[0].gpu
    plan = plan_from_json({**answer, "optimality_gap": 0.0})
    stages = tuple(stage if stage.gpu else replace(stage, gpu=gpu) for stage in plan.stages)
    nearest = find_nearest_plan(replace(plan, stages=stages), query.build_request(query.shapes[0]))
    return None if nearest is None else plan_to_json(nearest)


def render_export(export: Mapping[str, Any]) -> RenderableType:
    """Return the arguments and the file, ready to be copied, and the faster plan if there is one."""
    from rich.text import Text

    return stack(*(Text(line) for line in _list_lines(export)))


def _list_lines(export: Mapping[str, Any]) -> Iterator[str]:
    title, file, faster = find_framework(export["framework"]).title, export["file"], export["faster"]
    if faster is not None:
        gain = format_percent(faster["faster_ratio"])
        yield f"{title} cannot express {faster['plan']}, which is {gain} faster: {faster['reason']}"
        yield ""
    if export["args"]:
        yield f"Arguments for {title}:"
        yield from _list_argument_lines(export["args"], "" if file is None else file["name"])
    if export["args"] and file is not None:
        yield ""
    if file is not None:
        yield f"{file['name']} for {title}:"
        yield file["text"].rstrip()


def _list_argument_lines(args: Sequence[str], file: str) -> Iterator[str]:
    """Yield one line per flag, each but the last continued as in a shell."""
    words = [shlex.quote(word) for word in fill_args(args, file)]
    starts = [at for at, word in enumerate(words) if word.startswith("--") or at == 0]
    for start, end in pairwise([*starts, len(words)]):
        yield "  " + " ".join(words[start:end]) + (" \\" if end < len(words) else "")


def _find_faster_plan(
    plan: ParallelPlan, framework: Framework, request: SolveRequest, tolerance: float
) -> dict[str, Any] | None:
    fastest = solve_plan(request, tolerance=tolerance)
    if not isinstance(fastest, ParallelPlan) or not (reason := framework.find_problem(fastest)):
        return None
    ratio = plan.iteration_time_s / fastest.iteration_time_s - 1.0
    if ratio < _FASTER_RATIO_MIN:
        return None
    return {"plan": fastest.summarize(), "reason": reason, "faster_ratio": ratio}
