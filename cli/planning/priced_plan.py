"""`ebbtide plan --price`: predicts a plan of the user's and compares it with the fastest plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cli.inputs import input_errors_from, raise_input_error, read_yaml
from cli.output import format_bytes, format_duration, format_number, format_percent, render_facts, render_table, stack
from cli.planning.plan_tables import format_pipeline, render_stages, summarize_plan
from cli.planning.stage_diagram import StageDiagram
from scheduler.documents.plan_file import parse_plan_file
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.plan_pricing import price_plan, priced_plan_to_json
from scheduler.solver.search.plan_search import solve_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cli.planning.request import PlanQuery

Json = dict[str, Any]

_PARTS = {
    "compute": "compute_s",
    "tensor communication": "tensor_s",
    "sequence communication": "sequence_s",
    "expert communication": "expert_s",
    "data communication": "data_s",
    "optimizer, host": "other_s",
    "idle (bubble)": "idle_s",
}


_NOTHING_S = 1e-9
"""Parts of a step up to this are rounding errors."""
_SAME_RATIO = 1e-6
"""Steps whose lengths differ by less than this fraction are equally long."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The plan in a file. Stages without a GPU model have an empty one."""

    file: str
    plan: ParallelPlan

    @classmethod
    def read(cls, file: str) -> PlanFile:
        """Read a plan in JSON or YAML. Raises InputError if it is invalid."""
        document = read_yaml(file)
        with input_errors_from(f"--price {file}"):
            return cls(file, parse_plan_file(document, gpu=""))

    def list_missing_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the GPUs and the batch of the plan for options that were not given."""
        found: dict[str, Any] = {}
        models = {stage.gpu for stage in self.plan.stages} - {""}
        if options["global-batch"] is None:
            found["global-batch"] = self.plan.global_batch
        if options["shape"] is None:
            if len(models) > 1:
                raise_input_error(f"--price {self.file}: the plan mixes GPU models. Add --shape FILE.")
            if options["gpus"] is None:
                found["gpus"] = str(self.plan.world_size)
            if options["gpu"] is None and models:
                found["gpu"] = models.pop()
        return found


def solve_priced_plan(plan_file: PlanFile, query: PlanQuery, *, tolerance: float) -> Json:
    """Return the priced plan as JSON, compared with the fastest plan within the query's limits."""
    request = query.build_request(query.shapes[0])
    gpu = query.hardware[0].gpu
    stages = tuple(stage if stage.gpu else replace(stage, gpu=gpu) for stage in plan_file.plan.stages)
    priced = price_plan(replace(plan_file.plan, stages=stages), request)
    return priced_plan_to_json(priced, solve_plan(request, tolerance=tolerance), request)


def render_priced_plan(answer: Json) -> RenderableType:
    """Return the verdict, the stages, the diagram of the step, and the comparison with the fastest plan."""
    from rich.text import Text

    parts: list[Any] = [render_facts(_format_facts(answer)), Text(), render_stages(answer)]
    if answer["inspection"] is not None:
        parts += [Text(), StageDiagram(answer["inspection"], answer["iteration_time_s"])]
        if answer["optimum"] is not None:
            parts += [Text(), _render_comparison(answer)]
    return stack(*parts)


def _format_facts(answer: Json) -> dict[str, str]:
    facts = {"runnable": "yes" if answer["runnable"] else f"no: {answer['violation']}"}
    facts["pipeline"] = format_pipeline(answer)
    inspection, optimum = answer["inspection"], answer["optimum"]
    if inspection is not None:
        devices = inspection["devices"]
        fullest = max(devices, key=lambda device: float(device["memory_bytes"]) / device["memory_bytes_max"])
        need, limit = fullest["memory_bytes"], fullest["memory_bytes_max"]
        speed = f"{format_number(answer['samples_per_s'], 2)} samples/s"
        facts |= {
            "step": f"{format_duration(answer['iteration_time_s'])}, {speed}",
            "memory": f"{format_bytes(need)} of {format_bytes(limit)} per GPU ({format_percent(need / limit)})",
            "utilization": f"{format_percent(inspection['model_flops_utilization'])} of peak FLOPS (model FLOPS)",
        }
    if optimum is not None:
        facts["fastest"] = f"{summarize_plan(optimum)}, {format_duration(optimum['iteration_time_s'])}"
    if answer["slower_ratio"] is not None:
        # A plan outside the limits may be faster than all within them.
        is_slower = answer["slower_ratio"] > -_SAME_RATIO
        facts["slower by" if is_slower else "faster by"] = format_percent(abs(answer["slower_ratio"]))
    if answer["remark"]:
        facts["fastest"] = f"none: {answer['remark']}"
    return facts


def _render_comparison(answer: Json) -> RenderableType:
    """Return one line per part of the step: seconds of a GPU on average, of the plan and of the fastest plan."""
    return render_table(
        _list_parts(answer),
        headers=["part of the step", "this plan", "fastest", "difference"],
        right_aligned=["this plan", "fastest", "difference"],
    )


def _list_parts(answer: Json) -> Iterator[list[str]]:
    own, best = answer["inspection"]["devices"], answer["optimum"]["inspection"]["devices"]
    for name, field in _PARTS.items():
        mine_s, other_s = _compute_mean_s(own, field), _compute_mean_s(best, field)
        if max(mine_s, other_s) > _NOTHING_S:
            change_s = mine_s - other_s
            sign = "" if abs(change_s) <= _NOTHING_S else "+" if change_s > 0 else "-"
            difference = f"{sign}{format_duration(abs(change_s) if sign else 0.0)}"
            yield [name, format_duration(mine_s), format_duration(other_s), difference]


def _compute_mean_s(devices: list[Json], field: str) -> float:
    total = sum(device["gpus"] * device[field] for device in devices)
    return float(total / sum(device["gpus"] for device in devices))
