"""`version`, and `demo`: the whole story on this machine.

The table of contents of the command line: every verb, its group, and how a failure ends the process.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli import completion
from cli.commands import (
    accounting,
    events,
    fit,
    fleet,
    identity,
    jobs,
    plan,
    queues,
    replay,
    service,
    simulate,
    simulations,
    submit,
    webhooks,
)
from cli.inputs import EXIT_FAILED
from cli.output import OutputFormat, OutputOption, print_document, print_message, render_facts


def version(output: OutputOption = OutputFormat.TABLE) -> None:
    """Print the version of Ebbtide and of what it runs on."""
    try:
        ours = installed_version("ebbtide")
    except PackageNotFoundError:
        ours = "not installed (run from its source tree)"
    document = {"ebbtide": ours, "python": platform.python_version(), "platform": platform.platform()}
    print_document(document, output, lambda: render_facts(document))


PictureOption = Annotated[Path | None, typer.Option("--picture", help="Also draw what it prints into this SVG file.")]


def demo(picture: PictureOption = None) -> None:
    """Lend, grow, recall, shrink and return with real training processes, in about three minutes."""
    from cli.demo.scenario import run_demo

    print_message("Authentication is off for the demo, which listens on loopback alone.")
    raise typer.Exit(run_demo(picture=picture))


JOBS_PANEL = "Jobs"
FLEET_PANEL = "Fleet"
IDENTITY_PANEL = "Who asks"
LOCAL_PANEL = "On this machine, without a service"
SERVICE_PANEL = "Running the service"


class EbbtideGroup(TyperGroup):
    """Ends every failure in one line on stderr and the exit code of its kind."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            outcome = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as failure:
            typer.echo(f"Error: {_format_error(failure)}", err=True)
            sys.exit(failure.exit_code)
        except typer.Abort:
            typer.echo("Error: given up", err=True)
            sys.exit(EXIT_FAILED)
        sys.exit(outcome if isinstance(outcome, int) else 0)


def _format_error(failure: typer.TyperException) -> str:
    """The failure in one line; where typer refused an option's value, with the value, which it leaves out."""
    said = failure.format_message().replace("Value error, ", "")
    if isinstance(failure, typer.BadParameter) and failure.__cause__ is not None:
        from pydantic import ValidationError

        if isinstance(failure.__cause__, ValidationError):
            given = str(failure.__cause__.errors()[0]["input"])
            said = said if given in said else f"{said}, got '{given}'"
    return said


app = typer.Typer(
    cls=EbbtideGroup,
    name="ebbtide",
    help="Elastic GPU cluster scheduler: lends idle inference nodes to training and re-plans every job's parallelism.",
    pretty_exceptions_enable=False,
    add_completion=False,  # it guesses the shell, and puts two options before every verb: `completion` is told
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _add_commands(panel: str, *commands: Callable[..., None], hidden: bool = False) -> None:
    for verb in commands:
        app.command(rich_help_panel=panel, hidden=hidden)(verb)


_add_commands(JOBS_PANEL, submit.submit, jobs.ps, jobs.describe, events.explain, events.events, events.history)
_add_commands(JOBS_PANEL, jobs.logs, jobs.checkpoint)
_add_commands(JOBS_PANEL, jobs.scale, jobs.suspend, jobs.resume, jobs.cancel)
_add_commands(
    FLEET_PANEL, fleet.top, accounting.usage, fleet.loans, fleet.cordon, fleet.drain, fleet.uncordon, events.snapshot
)
for _group in (fleet.pools_app, fleet.nodes_app, queues.app, fleet.lending_app):
    app.add_typer(_group, rich_help_panel=FLEET_PANEL)
_add_commands(IDENTITY_PANEL, identity.login, identity.whoami, accounting.audit)
for _group in (identity.contexts_app, identity.tokens_app):
    app.add_typer(_group, rich_help_panel=IDENTITY_PANEL)
_add_commands(LOCAL_PANEL, plan.plan, fit.fit, simulate.simulate, replay.replay, demo, version, completion.completion)
app.add_typer(webhooks.app, rich_help_panel=JOBS_PANEL)
app.add_typer(simulations.app, rich_help_panel=JOBS_PANEL)
_add_commands(SERVICE_PANEL, service.serve, service.operator, service.migrate, service.export_trace)
_add_commands(SERVICE_PANEL, service.controller, service.api, hidden=True)
completion.enable_completion()
