"""`ebbtide predict`: compares predicted time and memory with measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.inputs import input_errors_from, load_hardware, raise_input_error, read_text
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
from cli.planning.error_table import render_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.solver.calibration.constant_fit import ErrorSummary
    from scheduler.solver.calibration.measured_runs import MeasuredRun
    from scheduler.solver.profiles.hardware_profile import HardwareProfile

RunsArgument = Annotated[
    str, typer.Argument(metavar="RUNS.csv", help="Measured runs in the columns of `ebbtide fit`; - for standard input.")
]
LearnOption = Annotated[
    int,
    typer.Option(
        "--learn", metavar="N", min=0, help="Learn from N runs, drawn from all kinds of plans; predict the others."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw of --learn.")]
GpuOption = Annotated[str, typer.Option("--gpu", metavar="NAME|FILE", help="GPU profile that predicts the runs.")]

_HEADERS = ["row", "model", "plan", "batch", "measured", "predicted", "error", "memory", "predicted", "error", "fits"]
_LEARNED_HEADERS = ["row", "model", "plan", "measured", "predicted", "error", "learned", "80% interval", "error"]


def predict(
    *,
    runs: RunsArgument,
    gpu: GpuOption,
    learn: LearnOption = 0,
    seed: SeedOption = 0,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Compare predicted time and memory with measured runs. Names the rows that have no prediction."""
    from scheduler.solver.calibration.measured_runs import MeasuredRunError, parse_rows

    hardware, csv_text = load_hardware("--gpu", gpu), read_text(runs)
    with input_errors_from(runs):
        outcomes = list(parse_rows(csv_text, hardware))
    usable = [(row, outcome) for row, outcome in outcomes if not isinstance(outcome, MeasuredRunError)]
    if learn >= max(len(usable), 1):
        raise_input_error(f"--learn is {learn}, but {len(usable)} runs can be predicted. Leave at least 1 of them out.")
    predicted = [_predict_run(row, run, hardware) for row, run in usable]
    if learn:
        factors = _learn_factors([run for _, run in usable], hardware, learn, seed)
        predicted = [{**each, **factor} for each, factor in zip(predicted, factors, strict=True)]
    unusable = [
        {"row": row, "reason": str(outcome)} for row, outcome in outcomes if isinstance(outcome, MeasuredRunError)
    ]
    errors = {"time": _summarize(predicted, "time_error"), "memory": _summarize(predicted, "memory_error")}
    if learn:
        others = [each for each in predicted if not each["is_drawn"]]
        errors["time, not drawn"] = _summarize(others, "time_error")
        errors["time, learned"] = _summarize(others, "learned_error")
    fit = sum(run["fits"] for run in predicted)
    document = {
        "gpu": hardware.gpu,
        "runs": predicted,
        "unusable": unusable,
        "summary": {
            **{name.replace(", ", "_").replace(" ", "_"): asdict(each) for name, each in errors.items()},
            "fit": fit,
            "of": len(predicted),
        },
    }
    print_document(document, output, lambda: _render(document, errors))


def _predict_run(row: int, run: MeasuredRun, hardware: HardwareProfile) -> Mapping[str, Any]:
    """Return the prediction as JSON. Like measured peaks, predicted ones are without the profile's reserve."""
    from scheduler.solver.evaluate import evaluate

    judged = evaluate(run.plan, run.build_request(hardware))
    needed_bytes = hardware.plannable_bytes(judged.peak_bytes_per_gpu)
    return {
        "row": row,
        "model": run.model.name,
        "plan": run.plan.summarize(),
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


def _learn_factors(
    runs: list[MeasuredRun], hardware: HardwareProfile, count: int, seed: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the learned prediction of each run as JSON. Runs that were drawn have none, because they are known."""
    import numpy as np

    from scheduler.solver.calibration.constant_fit import sample_runs
    from scheduler.solver.calibration.step_learning import learn_factors, measure_plans

    drawn = sample_runs(runs, count, np.random.default_rng(seed))
    rows = measure_plans(runs, hardware)
    factors = learn_factors(rows, [run.model for run in runs], drawn)
    for number, (run, row, factor) in enumerate(zip(runs, rows, factors, strict=True)):
        if number in drawn:
            yield {"is_drawn": True, "learned_s": None, "learned_interval_s": None, "learned_error": None}
            continue
        predicted_s = run.iteration_time_s / np.exp(row.log_ratio)
        yield {
            "is_drawn": False,
            "learned_s": float(predicted_s * factor.mean),
            "learned_interval_s": [float(predicted_s * bound) for bound in factor.interval],
            "learned_error": float(predicted_s * factor.mean / run.iteration_time_s - 1),
        }


def _summarize(predicted: list[Mapping[str, Any]], name: str) -> ErrorSummary:
    import numpy as np

    from scheduler.solver.calibration.constant_fit import ErrorSummary

    return ErrorSummary.from_ratios(np.array([run[name] for run in predicted if run[name] is not None]))


def _render(document: Mapping[str, Any], errors: Mapping[str, ErrorSummary]) -> RenderableType:
    from rich.text import Text

    summary = document["summary"]
    facts = {"GPU": document["gpu"], "in memory": f"{summary['fit']} of {summary['of']} runs fit"}
    parts: list[RenderableType] = [
        render_facts(facts),
        Text(),
        render_table(_format_rows(document["runs"]), headers=_HEADERS, right_aligned=_HEADERS[3:]),
        Text(),
    ]
    if learned := [run for run in document["runs"] if run.get("learned_s") is not None]:
        right_aligned = _LEARNED_HEADERS[3:]
        parts += [render_table(_format_learned(learned), headers=_LEARNED_HEADERS, right_aligned=right_aligned), Text()]
    parts.append(render_errors(errors))
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


def _format_learned(learned: list[Mapping[str, Any]]) -> Iterator[list[str]]:
    for run in learned:
        low_s, high_s = run["learned_interval_s"]
        yield [
            str(run["row"]),
            run["model"],
            run["plan"],
            format_duration(run["measured_s"]),
            format_duration(run["predicted_s"]),
            f"{run['time_error']:+.1%}",
            format_duration(run["learned_s"]),
            f"{format_duration(low_s)} to {format_duration(high_s)}",
            f"{run['learned_error']:+.1%}",
        ]
