"""`ebbtide profile`: measures the devices of this machine and writes their profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.exit_codes import InputError, RefusedError
from cli.output import (
    OutputFormat,
    OutputOption,
    format_bytes,
    format_duration,
    format_percent,
    print_document,
    render_facts,
    render_table,
    stack,
)
from cli.planning.error_table import render_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cli.planning.profile_run import ProfileResult
    from cli.planning.validation_chart import ValidationChart
    from scheduler.profiling.validation import Validation

DEVICE_KINDS = ("cpu", "cuda", "rocm", "npu")

OutOption = Annotated[Path, typer.Option("--out", metavar="FILE.json", help="Output file of the GPU profile.")]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="KIND", help="cpu, cuda, rocm or npu. Default: what the drivers report.")
]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Devices to measure together, one process on each.")]
NameOption = Annotated[
    str, typer.Option("--name", metavar="NAME", help="Name of the GPU in the profile. Default: that of --base.")
]
BaseOption = Annotated[
    str,
    typer.Option(
        "--base",
        metavar="NAME|FILE",
        help="Profile with the figures that are not measured, such as the network's. Default: that of the product.",
    ),
]
LogOption = Annotated[
    Path | None,
    typer.Option(
        "--measurements",
        metavar="FILE.jsonl",
        help="File of single measurements. A run goes on from what it holds. Default: the profile's name with .jsonl.",
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, max=9, help="Times to measure everything, in turn.")]
LimitOption = Annotated[
    float | None, typer.Option("--time-limit", min=1.0, metavar="SECONDS", help="Begin no measurement after this time.")
]
ValidateOption = Annotated[
    bool, typer.Option("--validate", help="Run plans of a small model, and compare predicted with measured steps.")
]
PlansOption = Annotated[int, typer.Option("--plans", min=1, max=500, help="Plans of the validation, at most.")]
TableOption = Annotated[
    Path | None, typer.Option("--table", metavar="FILE.csv", help="Output file of the validation's steps.")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Scatter chart of predicted against measured steps.")
]
GalvatronOption = Annotated[
    Path | None, typer.Option("--galvatron", metavar="DIR", help="Also write the measurements as Galvatron's files.")
]
ScaleOption = Annotated[
    str,
    typer.Option(
        "--scale",
        metavar="NAME",
        help="Sizes of measurements: accelerator, processor or tiny. Default: what suits the device.",
    ),
]
BusyOption = Annotated[bool, typer.Option("--allow-busy", help="Measure even if other programs use the device.")]
UtilisationOption = Annotated[
    float, typer.Option("--utilisation-max", min=0.0, max=1.0, help="Refuse a device that is busier than this.")
]


def profile(
    *,
    out: OutOption,
    device: DeviceOption = "",
    ranks: RanksOption = 1,
    name: NameOption = "",
    base: BaseOption = "",
    measurements: LogOption = None,
    rounds: RoundsOption = 2,
    time_limit: LimitOption = None,
    validate: ValidateOption = False,
    plans: PlansOption = 64,
    table: TableOption = None,
    plot: PlotOption = None,
    galvatron: GalvatronOption = None,
    scale: ScaleOption = "",
    allow_busy: BusyOption = False,
    utilisation_max: UtilisationOption = 0.2,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Measure the devices of this machine, and write their profile. Goes on where an interrupted run stopped."""
    from cli.planning.profile_run import ProfileOptions, detect_device_kind, run_profile, write_galvatron, write_profile
    from cli.planning.validation_chart import ValidationChart

    _check_choices(device, scale)
    if (table or plot) and not validate:
        raise InputError("--table and --plot show a validation. Add --validate.")
    chart = ValidationChart(plot) if plot else None
    kind = device or detect_device_kind()
    if not allow_busy:
        _reject_busy_devices(kind, ranks, utilisation_max)
    options = ProfileOptions(
        device=kind,
        ranks=ranks,
        base=base,
        name=name,
        rounds=rounds,
        plans=plans if validate else 0,
        time_limit_s=time_limit or inf,
        scale=scale,
    )
    result = run_profile(options, measurements or out.with_suffix(".jsonl"))
    write_profile(result, out)
    _write_validation(result, table, chart)
    print_document(_to_document(result), output, lambda: _render(result))
    if galvatron is not None:
        write_galvatron(result, galvatron)


def _check_choices(device: str, scale: str) -> None:
    from scheduler.profiling.task_lists import SCALES

    for option, value, known in (("--device", device, DEVICE_KINDS), ("--scale", scale, tuple(SCALES))):
        if value and value not in known:
            raise InputError(f"{option}: {value!r} is unknown. Use one of {', '.join(known)}.")


def _write_validation(result: ProfileResult, table: Path | None, chart: ValidationChart | None) -> None:
    from cli.planning.profile_run import format_validation_csv, write_text
    from cli.planning.validation_chart import format_chart_title

    if result.validation is None:
        return
    if table is not None:
        write_text("--table", table, format_validation_csv(result.validation))
    if chart is not None:
        chart.draw(result.validation, format_chart_title(result.validation, result.device))


def _reject_busy_devices(kind: str, ranks: int, utilisation_max: float) -> None:
    from scheduler.profiling.device_use import BusyDeviceError, reject_busy_devices

    try:
        reject_busy_devices(kind, ranks, utilisation_max=utilisation_max)
    except BusyDeviceError as error:
        raise RefusedError(str(error)) from error


def _to_document(result: ProfileResult) -> Mapping[str, Any]:
    from cli.planning.profile_run import flatten_step
    from scheduler.profiling.layer_figures import compute_layer_figures

    hardware, validation = result.derived.hardware, result.validation
    figures = {
        each: {"value": getattr(hardware, each), "source": text} for each, text in result.derived.sources.items()
    }
    figures.pop("collectives", None)
    document: dict[str, Any] = {
        "gpu": hardware.gpu,
        "device": asdict(result.device),
        "base": result.base,
        "figures": figures,
        "layers": [asdict(each) for each in compute_layer_figures(result.figures)],
        "failed": [{"task": task, "reason": reason} for task, reason in result.failed],
        "skipped": result.skipped,
    }
    if validation is not None:
        document["validation"] = {
            "steps": [flatten_step(step) for step in validation.steps],
            "time": asdict(validation.time),
            "memory": asdict(validation.memory),
            "terms": [{**asdict(term), "effect": term.effect} for term in validation.terms],
            "infeasible": result.infeasible,
        }
    return document


def _render(result: ProfileResult) -> RenderableType:
    from rich.text import Text

    device = result.device
    facts = {
        "device": f"{device.name}, {device.software}, {device.ranks} ranks",
        "profile": f"{result.derived.hardware.gpu}, based on {result.base}",
    }
    if result.skipped:
        facts["skipped"] = f"{result.skipped} measurements, for which no time was left. Run again to go on."
    if result.failed:
        facts["failed"] = f"{len(result.failed)}; the first: {result.failed[0][0]}: {result.failed[0][1]}"
    parts: list[RenderableType] = [render_facts(facts), Text(), _render_figures(result)]
    if result.validation is not None:
        parts += [Text(), *_render_validation(result.validation)]
    return stack(*parts)


def _render_figures(result: ProfileResult) -> RenderableType:
    from scheduler.solver.calibration.hardware_constants import get_unit

    rows = [
        [name, f"{value:.4g}", get_unit(name), source.partition(";")[0]]
        for name, source in result.derived.sources.items()
        if isinstance(value := getattr(result.derived.hardware, name), int | float)
    ]
    return render_table(rows, headers=["figure", "value", "unit", "source"], right_aligned=["value"])


def _render_validation(validation: Validation) -> Iterator[RenderableType]:
    from rich.text import Text

    heads = ["plan", "seq", "measured", "predicted", "error", "spread", "memory", "predicted", "error"]
    rows = [
        [
            step.task.plan.summarize(),
            str(step.task.shape.sequence),
            format_duration(step.measured_s),
            format_duration(step.predicted_s),
            f"{step.time_error:+.1%}",
            format_percent(step.spread),
            format_bytes(step.measured_bytes),
            format_bytes(step.predicted_bytes),
            f"{step.memory_error:+.1%}",
        ]
        for step in sorted(validation.steps, key=lambda each: abs(each.time_error))
    ]
    yield render_table(rows, headers=heads, right_aligned=heads[1:])
    yield Text()
    yield render_errors({"step time": validation.time, "memory": validation.memory}, counted="steps")
    yield Text()
    heads = ["term, worst first", "share", "factor that suits", "effect on the step"]
    rows = [
        [term.name, format_percent(term.share), f"{term.factor:.2f}", f"{term.effect:+.1%}"]
        for term in validation.terms
        if term.share
    ]
    yield render_table(rows, headers=heads, right_aligned=heads[1:])
