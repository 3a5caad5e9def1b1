"""`version`, and `demo`: the whole story on this machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from scheduler.cli.output import Format, OutputOption, emit, facts, say


def version(output: OutputOption = Format.TABLE) -> None:
    """Print the version of Ebbtide and of what it runs on."""
    try:
        ours = installed_version("ebbtide")
    except PackageNotFoundError:
        ours = "not installed (run from its source tree)"
    document = {"ebbtide": ours, "python": platform.python_version(), "platform": platform.platform()}
    emit(document, output, lambda: facts(document))


PictureOption = Annotated[Path | None, typer.Option("--picture", help="Also draw what it prints into this SVG file.")]


def demo(picture: PictureOption = None) -> None:
    """Lend, grow, recall, shrink and return with real training processes, in about three minutes."""
    from scheduler.demo.story import run

    say("Authentication is off for the demo, which listens on loopback alone.")
    raise typer.Exit(run(picture=picture))
