"""`ebbtide fit`: calibrates a GPU profile from measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.exit_codes import CommandError
from cli.inputs import input_errors_from, load_hardware, raise_input_error, read_text
from cli.output import OutputFormat, OutputOption, format_percent, print_document, render_facts, render_table, stack
from cli.planning.error_table import render_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.solver.calibration.constant_fit import Calibration


RunsArgument = Annotated[str, typer.Argument(metavar="RUNS.csv", help="Measured runs: a header and one run per row.")]
StartingGpuOption = Annotated[str, typer.Option("--gpu", metavar="NAME|FILE", help="GPU profile to start from.")]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Runs to fit; the others validate the fit.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling of runs.")]
ConstantsOption = Annotated[
    str | None, typer.Option("--constants", metavar="NAME[,NAME...]", help="Constants to fit. Default: a standard set.")
]
LeaveOneOutOption = Annotated[
    bool, typer.Option("--leave-one-out", help="Also predict each sampled run from the others.")
]
OutputFileOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE.json", help="Output file of the GPU profile.")
]

_CONSTANT_HEADERS = ["constant", "unit", "before", "after", "std. dev.", "determined by runs"]
_ERROR_LABELS = {
    "before": "all runs, before",
    "on_drawn": "sampled runs",
    "left_out": "sampled runs, leave-one-out",
    "on_others": "other runs",
    "memory": "memory, all runs",
}


def fit(
    *,
    runs: RunsArgument,
    gpu: StartingGpuOption,
    rows: RowsOption = 20,
    seed: SeedOption = 0,
    constants: ConstantsOption = None,
    leave_one_out: LeaveOneOutOption = False,
    out: OutputFileOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Calibrate a GPU profile from measured runs. Prints the prediction error before and after."""
    import numpy as np

    from scheduler.solver.calibration.constant_fit import calibrate, sample_runs
    from scheduler.solver.calibration.measured_runs import parse_measured_runs

    hardware, csv_text = load_hardware("--gpu", gpu), read_text(runs)
    with input_errors_from(runs):
        measured = parse_measured_runs(csv_text, hardware)
    sampled = sample_runs(measured, rows, np.random.default_rng(seed))
    if leave_one_out and len(sampled) < 2:
        raise_input_error(f"--leave-one-out: {len(sampled)} run is sampled. At least 2 are required.")
    names = tuple(name.strip() for name in constants.split(",")) if constants else ()
    with input_errors_from("--constants" if names else runs):
        result = calibrate(measured, hardware, sampled, names=names, leave_one_out=leave_one_out)
    source = f"fitted to {len(sampled)} of {len(measured)} runs of {Path(runs).name}, seed {seed}"
    if out is not None:
        _write_profile(out, result, source, gpu)
    print_document(_to_document(result, source), output, lambda: _render_calibration(result, source))


def _write_profile(out: Path, calibration: Calibration, source: str, gpu: str) -> None:
    from scheduler.solver.calibration.hardware_constants import format_gpu_document

    sources = {constant.name: source for constant in calibration.fit.constants} | {"prediction_error": source}
    text = format_gpu_document(calibration.hardware, source=f"as in the profile {Path(gpu).name}", sources=sources)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--out: {out} cannot be written: {error.strerror or error}") from error


def _to_document(calibration: Calibration, source: str) -> Mapping[str, Any]:
    from scheduler.solver.calibration.hardware_constants import get_unit

    constants = [{**asdict(each), "unit": get_unit(each.name)} for each in calibration.fit.constants]
    errors = {name: asdict(getattr(calibration, name)) for name in _ERROR_LABELS if getattr(calibration, name)}
    return {"source": source, "drawn": list(calibration.drawn), "constants": constants, "errors": errors}


def _render_calibration(calibration: Calibration, source: str) -> RenderableType:
    from rich.text import Text

    constants = render_table(
        _format_constant_rows(calibration), headers=_CONSTANT_HEADERS, right_aligned=_CONSTANT_HEADERS[2:]
    )
    found = {meaning: getattr(calibration, name) for name, meaning in _ERROR_LABELS.items()}
    errors = render_errors({meaning: each for meaning, each in found.items() if each is not None})
    return stack(render_facts({"source": source}), Text(), constants, Text(), errors)


def _format_constant_rows(calibration: Calibration) -> Iterator[list[str]]:
    from scheduler.solver.calibration.hardware_constants import get_unit

    for each in calibration.fit.constants:
        figures = [f"{each.before:.4g}", f"{each.after:.4g}", format_percent(each.sd), format_percent(each.told)]
        yield [each.name, get_unit(each.name), *figures]
