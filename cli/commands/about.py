"""`ebbtide version` and `ebbtide demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.output import OutputFormat, OutputOption, print_document, print_message, render_facts

PictureOption = Annotated[Path | None, typer.Option("--picture", help="Save the output as an SVG picture as well.")]


def version(output: OutputOption = OutputFormat.TABLE) -> None:
    """Print the version of Ebbtide and of Python."""
    import platform

    from scheduler.package_version import get_package_version

    document = {"ebbtide": get_package_version(), "python": platform.python_version(), "platform": platform.platform()}
    print_document(document, output, lambda: render_facts(document))


def demo(picture: PictureOption = None) -> None:
    """Run a three-minute demo with real training processes. Lends, grows, recalls, shrinks and returns."""
    from cli.demo.scenario import run_demo

    print_message("Authentication is off in the demo; its API listens on the loopback address only.")
    raise typer.Exit(run_demo(picture=picture))
