"""`ebbtide predict`: predicted time and memory beside measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.inputs import input_errors_from, load_hardware, read_text
from cli.output import (
    OutputFormat,
    OutputOption,
    format_bytes,
    format_duration,
    print_document,
    render_facts,
    render_table,
    stack,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.domain.parallel_plan import ParallelPlan
    from scheduler.solver.calibration.measured_runs import MeasuredRun
    from scheduler.solver.profiles.hardware_profile import HardwareProfile

RunsArgument = Annotated[
    str, typer.Argument(metavar="RUNS.csv", help="Measured runs in the columns of `ebbtide fit`; - for standard input.")
]
GpuOption = Annotated[str, typer.Option("--gpu", metavar="NAME|FILE", help="GPU profile that predicts the runs.")]

_HEADERS = ["row", "model", "plan", "batch", "measured", "predicted", "error", "memory", "predicted", "error", "fits"]


def predict(*, runs: RunsArgument, gpu: GpuOption, output: OutputOption = OutputFormat.TABLE) -> None:
    """Compare predicted time and memory with measured runs. Names the rows that have no prediction."""
    from scheduler.solver.calibration.measured_runs import MeasuredRunError, parse_rows

    hardware, csv_text = load_hardware("--gpu", gpu), read_text(runs)
    with input_errors_from(runs):
        outcomes = list(parse_rows(csv_text, hardware))
    predicted = [
        _predict_run(row, outcome, hardware) for row, outcome in outcomes if not isinstance(outcome, MeasuredRunError)
    ]
    unusable = [
        {"row": row, "reason": str(outcome)} for row, outcome in outcomes if isinstance(outcome, MeasuredRunError)
    ]
    document = {
        "gpu": hardware.gpu,
        "runs": predicted,
        "unusable": unusable,
        "summary": _summarize(predicted),
    }
    print_document(document, output, lambda: _render(document))


def _predict_run(row: int, run: MeasuredRun, hardware: HardwareProfile) -> Mapping[str, Any]:
    """Return the prediction as JSON. Like measured peaks, predicted ones are without the profile's reserve."""
    from scheduler.solver.evaluate import evaluate

    judged = evaluate(run.plan, run.build_request(hardware))
    needed_bytes = hardware.plannable_bytes(judged.peak_bytes_per_gpu)
    return {
        "row": row,
        "model": run.model.name,
        "plan": _format_plan(run.plan),
        "gpus": run.plan.world_size,
        "micro_batches": run.plan.micro_batches,
        "global_batch": run.plan.global_batch,
        "measured_s": run.iteration_time_s,
        "predicted_s": judged.iteration_time_s,
        "time_error": judged.iteration_time_s / run.iteration_time_s - 1,
        "measured_bytes": run.peak_bytes or None,
        "predicted_bytes": needed_bytes,
        "memory_error": needed_bytes / run.peak_bytes - 1 if run.peak_bytes else None,
        "occupied_bytes": judged.peak_bytes_per_gpu,
        "fits": judged.fits,
    }


def _format_plan(plan: ParallelPlan) -> str:
    strategy = plan.stages[0].strategies[0]
    degrees = {"tp": strategy.tp, "pp": plan.pipeline_devices, "dp": strategy.dp, "ulysses": strategy.ulysses}
    degrees |= {"ring": strategy.ring, "ep": strategy.ep, "zero": strategy.zero + 1}
    words = [f"{name}={degree - (name == 'zero')}" for name, degree in degrees.items() if degree > 1]
    if strategy.recompute.value != "none":
        words.append(f"recompute={strategy.recompute.value}")
    return " ".join(words) or "one GPU"


def _summarize(predicted: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    import numpy as np

    from scheduler.solver.calibration.constant_fit import ErrorSummary

    def summarize(name: str) -> Mapping[str, Any]:
        return asdict(ErrorSummary.from_ratios(np.array([run[name] for run in predicted if run[name] is not None])))

    fit = sum(run["fits"] for run in predicted)
    return {"time": summarize("time_error"), "memory": summarize("memory_error"), "fit": fit, "of": len(predicted)}


def _render(document: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    summary = document["summary"]
    facts = {"GPU": document["gpu"], "in memory": f"{summary['fit']} of {summary['of']} runs fit"}
    parts: list[RenderableType] = [
        render_facts(facts),
        Text(),
        render_table(_format_rows(document["runs"]), headers=_HEADERS, right_aligned=_HEADERS[3:]),
        Text(),
        _render_errors(summary),
    ]
    if document["unusable"]:
        rows = ([str(each["row"]), each["reason"]] for each in document["unusable"])
        parts += [Text(), render_table(rows, headers=["row", "no prediction, because"])]
    return stack(*parts)


def _format_rows(predicted: list[Mapping[str, Any]]) -> Iterator[list[str]]:
    for run in predicted:
        measured = run["measured_bytes"]
        yield [
            str(run["row"]),
            run["model"],
            run["plan"],
            f"{run['global_batch']}/{run['micro_batches']}",
            format_duration(run["measured_s"]),
            format_duration(run["predicted_s"]),
            f"{run['time_error']:+.1%}",
            "" if measured is None else format_bytes(measured),
            format_bytes(run["predicted_bytes"]),
            "" if measured is None else f"{run['memory_error']:+.1%}",
            "yes" if run["fits"] else "no",
        ]


def _render_errors(summary: Mapping[str, Any]) -> RenderableType:
    heads = ["|predicted / measured - 1|", "runs", "mean", "median", "95%", "worst"]
    rows = (
        [name, str(errors["runs"]), *(f"{errors[each]:.2%}" for each in ("mean", "median", "p95", "worst"))]
        for name in ("time", "memory")
        if (errors := summary[name])["runs"]
    )
    return render_table(rows, headers=heads, right_aligned=heads[1:])
