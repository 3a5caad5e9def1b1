"""`fit`: constants of a GPU from measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.failure import Failed, blaming, refuse
from scheduler.cli.humanise import share
from scheduler.cli.inputs import hardware_of, text_of
from scheduler.cli.output import Format, OutputOption, columns, emit, facts, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.solver.calibrate.report import Calibration

RunsArgument = Annotated[str, typer.Argument(metavar="RUNS.csv", help="Measured runs, a header and one a row.")]
GpuOption = Annotated[str, typer.Option("--gpu", metavar="NAME|FILE", help="What they ran on; where the fit starts.")]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Runs to fit to; the others judge the fit.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw.")]
ConstantsOption = Annotated[
    str | None, typer.Option("--constants", metavar="NAME[,NAME...]", help="What to fit; else the usual ones.")
]
LeaveOption = Annotated[bool, typer.Option("--leave-one-out", help="Also predict each drawn run from the others.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="Where to write the GPU's profile.")]

_HEADS = ["constant", "unit", "before", "after", "+-", "told by runs"]
_ERRORS = {
    "before": "all runs, before",
    "on_drawn": "drawn runs",
    "left_out": "drawn runs, each left out",
    "on_others": "other runs",
    "memory": "memory, all runs",
}


def fit(
    *,
    runs: RunsArgument,
    gpu: GpuOption,
    rows: RowsOption = 20,
    seed: SeedOption = 0,
    constants: ConstantsOption = None,
    leave_one_out: LeaveOption = False,
    out: OutOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Fit the constants of a GPU to measured runs, and say how far off the predictions are. Needs no service."""
    import numpy as np

    from scheduler.solver.calibrate.report import calibrate, draw
    from scheduler.solver.calibrate.run_document import read_runs

    hardware, csv_text = hardware_of("--gpu", gpu), text_of(runs)
    with blaming(runs):
        measured = read_runs(csv_text, hardware)
    drawn = draw(measured, rows, np.random.default_rng(seed))
    if leave_one_out and len(drawn) < 2:
        refuse(f"--leave-one-out: {len(drawn)} run is drawn; at least 2 are needed")
    names = tuple(name.strip() for name in constants.split(",")) if constants else ()
    with blaming("--constants" if names else runs):
        found = calibrate(measured, hardware, drawn, names=names, leave_one_out=leave_one_out)
    source = f"fitted to {len(drawn)} of {len(measured)} runs of {Path(runs).name}, seed {seed}"
    if out is not None:
        _write(out, found, source, gpu)
    emit(_document(found, source), output, lambda: _view(found, source))


def _write(out: Path, found: Calibration, source: str, gpu: str) -> None:
    from scheduler.solver.calibrate.gpu_document import gpu_document

    sources = {constant.name: source for constant in found.fit.constants}
    text = gpu_document(found.fit.hardware, source=f"as in the profile {Path(gpu).name}", sources=sources)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as wrong:
        raise Failed(f"--out: {out} cannot be written: {wrong.strerror or wrong}") from wrong


def _document(found: Calibration, source: str) -> Mapping[str, Any]:
    from scheduler.solver.calibrate.constants import unit_of

    constants = [{**asdict(each), "unit": unit_of(each.name)} for each in found.fit.constants]
    errors = {name: asdict(getattr(found, name)) for name in _ERRORS if getattr(found, name)}
    return {"source": source, "drawn": list(found.drawn), "constants": constants, "errors": errors}


def _view(found: Calibration, source: str) -> RenderableType:
    from rich.text import Text

    constants = columns(_constants(found), heads=_HEADS, right=_HEADS[2:])
    heads = ["|predicted / measured - 1|", "runs", "mean", "median", "95%", "worst"]
    errors = columns(_errors(found), heads=heads, right=heads[1:])
    return stacked(facts({"source": source}), Text(), constants, Text(), errors)


def _constants(found: Calibration) -> Iterator[list[str]]:
    from scheduler.solver.calibrate.constants import unit_of

    for each in found.fit.constants:
        figures = [f"{each.before:.4g}", f"{each.after:.4g}", share(each.sd), share(each.told)]
        yield [each.name, unit_of(each.name), *figures]


def _errors(found: Calibration) -> Iterator[list[str]]:
    for name, meaning in _ERRORS.items():
        errors = getattr(found, name)
        if errors is not None and errors.runs:
            figures = (errors.mean, errors.median, errors.p95, errors.worst)
            yield [meaning, str(errors.runs), *(f"{100 * figure:.2f}%" for figure in figures)]
