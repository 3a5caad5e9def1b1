"""The table of contents of the command line: every verb, its group, and how a failure ends the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from scheduler.cli import (
    about,
    audit,
    checkpoints,
    completing,
    export_trace,
    fit,
    fleet,
    jobs,
    lending,
    login,
    logs,
    plan,
    queues,
    record,
    replay,
    serve,
    simulate,
    simulations,
    submit,
    tokens,
    top,
    usage,
    webhooks,
)
from scheduler.cli.failure import FAILED

JOBS = "Jobs"
FLEET = "Fleet"
IDENTITY = "Who asks"
LOCAL = "On this machine, without a service"
SERVICE = "Running the service"


class Ebbtide(TyperGroup):
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
            typer.echo(f"Error: {_sentence(failure)}", err=True)
            sys.exit(failure.exit_code)
        except typer.Abort:
            typer.echo("Error: given up", err=True)
            sys.exit(FAILED)
        sys.exit(outcome if isinstance(outcome, int) else 0)


def _sentence(failure: typer.TyperException) -> str:
    """The failure in one line; where typer refused an option's value, with the value, which it leaves out."""
    said = failure.format_message().replace("Value error, ", "")
    if isinstance(failure, typer.BadParameter) and failure.__cause__ is not None:
        from pydantic import ValidationError

        if isinstance(failure.__cause__, ValidationError):
            given = str(failure.__cause__.errors()[0]["input"])
            said = said if given in said else f"{said}, got '{given}'"
    return said


app = typer.Typer(
    cls=Ebbtide,
    name="ebbtide",
    help="Elastic GPU cluster scheduler: lends idle inference nodes to training and re-plans every job's parallelism.",
    pretty_exceptions_enable=False,
    add_completion=False,  # it guesses the shell, and puts two options before every verb: `completion` is told
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def contents(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _add(group: str, *verbs: Callable[..., None], hidden: bool = False) -> None:
    for verb in verbs:
        app.command(rich_help_panel=group, hidden=hidden)(verb)


_add(JOBS, submit.submit, jobs.ps, jobs.describe, record.explain, record.events, record.history)
_add(JOBS, logs.logs, checkpoints.checkpoint)
_add(JOBS, jobs.scale, jobs.suspend, jobs.resume, jobs.cancel)
_add(FLEET, top.top, usage.usage, lending.loans, fleet.cordon, fleet.drain, fleet.uncordon, record.snapshot)
for _group in (fleet.pools_app, fleet.nodes_app, queues.app, lending.app):
    app.add_typer(_group, rich_help_panel=FLEET)
_add(IDENTITY, login.login, login.whoami, audit.audit)
for _group in (login.app, tokens.app):
    app.add_typer(_group, rich_help_panel=IDENTITY)
_add(LOCAL, plan.plan, fit.fit, simulate.simulate, replay.replay, about.demo, about.version, completing.completion)
app.add_typer(webhooks.app, rich_help_panel=JOBS)
app.add_typer(simulations.app, rich_help_panel=JOBS)
_add(SERVICE, serve.serve, serve.operator, serve.migrate, export_trace.export_trace)
_add(SERVICE, serve.controller, serve.api, hidden=True)
completing.enable()
