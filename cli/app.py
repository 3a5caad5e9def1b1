"""The `ebbtide` command: its table of subcommands and how an error ends the process.

A subcommand's module is imported only when that subcommand runs, so `ebbtide --help` stays fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from cli.exit_codes import CommandError, ExitCode, format_error, wants_json

JOBS_PANEL = "Jobs"
FLEET_PANEL = "Fleet"
IDENTITY_PANEL = "Identity and access"
LOCAL_PANEL = "Local tools (no service needed)"
SERVICE_PANEL = "Service"
COMPLETE_VARIABLE = "_EBBTIDE_COMPLETE"


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One row of the command table.

    `target` names a function or a `typer.Typer` as `module:attribute`; `summary` is its line in `ebbtide --help` and
    the first sentence of the function's docstring. With `takes_command`, all words after its options are a command line
    with options of its own.
    """

    name: str
    target: str
    panel: str
    summary: str
    hidden: bool = False
    takes_command: bool = False


SUBCOMMANDS = (
    Subcommand(
        "submit",
        "cli.commands.submit:submit",
        JOBS_PANEL,
        "Submit a job from a file, from options, or both.",
        takes_command=True,
    ),
    Subcommand("ps", "cli.commands.jobs:ps", JOBS_PANEL, "List live jobs, and those that failed in the last 24 hours."),
    Subcommand("describe", "cli.commands.jobs:describe", JOBS_PANEL, "Show the details of one job."),
    Subcommand(
        "explain",
        "cli.commands.events:explain",
        JOBS_PANEL,
        "Explain why a job is in its current state, or why a pool lends no more nodes.",
    ),
    Subcommand("events", "cli.commands.events:events", JOBS_PANEL, "List the most recent events, oldest first."),
    Subcommand("history", "cli.commands.events:history", JOBS_PANEL, "Show a job's past states and allocations."),
    Subcommand("logs", "cli.commands.jobs:logs", JOBS_PANEL, "Print the log of one rank of a job."),
    Subcommand(
        "checkpoint", "cli.commands.checkpoints:app", JOBS_PANEL, "Request, verify, export or reshard checkpoints."
    ),
    Subcommand("scale", "cli.commands.jobs:scale", JOBS_PANEL, "Change the GPU range of a job."),
    Subcommand("label", "cli.commands.jobs:label", JOBS_PANEL, "Set and remove labels of a job that has not ended."),
    Subcommand("suspend", "cli.commands.jobs:suspend", JOBS_PANEL, "Checkpoint a job and release its GPUs."),
    Subcommand("resume", "cli.commands.jobs:resume", JOBS_PANEL, "Resume a suspended job."),
    Subcommand("cancel", "cli.commands.jobs:cancel", JOBS_PANEL, "Cancel a job and keep its last checkpoint."),
    Subcommand("webhooks", "cli.commands.webhooks:app", JOBS_PANEL, "Manage webhooks and their deliveries."),
    Subcommand("simulations", "cli.commands.simulations:app", JOBS_PANEL, "Run simulations on the service."),
    Subcommand("top", "cli.commands.fleet:top", FLEET_PANEL, "Show pools, loans and live jobs on one screen."),
    Subcommand(
        "problems",
        "cli.commands.problems:problems",
        FLEET_PANEL,
        "List what is wrong with the service and its fleet, and what helps.",
    ),
    Subcommand("usage", "cli.commands.accounting:usage", FLEET_PANEL, "Report GPU-hours, including running jobs."),
    Subcommand(
        "savings",
        "cli.commands.accounting:savings",
        FLEET_PANEL,
        "Report GPU-hours lent, used, lost and idle while jobs waited, with amounts at the set prices.",
    ),
    Subcommand("loans", "cli.commands.fleet:loans", FLEET_PANEL, "List lent inference nodes and their deadlines."),
    Subcommand("cordon", "cli.commands.fleet:cordon", FLEET_PANEL, "Mark a node as unschedulable."),
    Subcommand("drain", "cli.commands.fleet:drain", FLEET_PANEL, "Cordon a node and move its jobs to other nodes."),
    Subcommand("uncordon", "cli.commands.fleet:uncordon", FLEET_PANEL, "Mark a node as schedulable."),
    Subcommand("snapshot", "cli.commands.events:snapshot", FLEET_PANEL, "Download the scheduler's latest snapshot."),
    Subcommand("pools", "cli.commands.fleet:pools_app", FLEET_PANEL, "List, create, change or delete pools."),
    Subcommand("nodes", "cli.commands.fleet:nodes_app", FLEET_PANEL, "List, add, change or delete nodes."),
    Subcommand(
        "hardware",
        "cli.commands.hardware:app",
        FLEET_PANEL,
        "List, show, set or delete GPU profiles, and networks of pools.",
    ),
    Subcommand(
        "machines", "cli.commands.machines:app", FLEET_PANEL, "List or remove machines, or create tokens to join."
    ),
    Subcommand(
        "slurm", "cli.commands.slurm:app", FLEET_PANEL, "Submit, list or cancel Slurm jobs that run node agents."
    ),
    Subcommand("queues", "cli.commands.queues:app", FLEET_PANEL, "List, create, change or delete queues."),
    Subcommand("secrets", "cli.commands.queue_secrets:app", FLEET_PANEL, "Set, list or delete the secrets of a queue."),
    Subcommand(
        "lending",
        "cli.commands.lending:app",
        FLEET_PANEL,
        "Pause or resume lending, recall or veto loans, report recalls, or test lending.",
    ),
    Subcommand(
        "demand",
        "cli.commands.demand:app",
        FLEET_PANEL,
        "Show the demand of an inference pool, or report recorded demand.",
    ),
    Subcommand(
        "forecast",
        "cli.commands.forecast:app",
        FLEET_PANEL,
        "Show the demand forecast of a pool, or test forecasts on recorded demand.",
    ),
    Subcommand("login", "cli.commands.identity:login", IDENTITY_PANEL, "Save a service's URL and your token for it."),
    Subcommand(
        "whoami", "cli.commands.identity:whoami", IDENTITY_PANEL, "Show your name, id and roles on the service."
    ),
    Subcommand(
        "console",
        "cli.commands.console:console",
        IDENTITY_PANEL,
        "Print a URL that opens the web console, signed in as you.",
    ),
    Subcommand("audit", "cli.commands.audit:app", IDENTITY_PANEL, "List or verify the audit log (admins only)."),
    Subcommand("context", "cli.commands.identity:contexts_app", IDENTITY_PANEL, "List, use or delete saved services."),
    Subcommand("token", "cli.commands.identity:tokens_app", IDENTITY_PANEL, "Create, list or revoke API tokens."),
    Subcommand(
        "accounts",
        "cli.commands.accounts:app",
        IDENTITY_PANEL,
        "Manage service accounts, the callers of programs, and rotate their tokens.",
    ),
    Subcommand("plan", "cli.commands.plan:plan", LOCAL_PANEL, "Find the fastest parallel plan of a model."),
    Subcommand("fit", "cli.commands.fit:fit", LOCAL_PANEL, "Calibrate a GPU profile from measured runs."),
    Subcommand(
        "profile",
        "cli.commands.profile:profile",
        LOCAL_PANEL,
        "Measure the devices of this machine, and write their profile.",
    ),
    Subcommand(
        "predict", "cli.commands.predict:predict", LOCAL_PANEL, "Compare predicted time and memory with measured runs."
    ),
    Subcommand("simulate", "cli.commands.simulate:simulate", LOCAL_PANEL, "Compare scheduling policies on a trace."),
    Subcommand("serving", "cli.commands.serving:app", LOCAL_PANEL, "Size inference pools from requests."),
    Subcommand("replay", "cli.commands.replay:replay", LOCAL_PANEL, "Run one scheduling cycle on a saved snapshot."),
    Subcommand(
        "demo",
        "cli.commands.demo:app",
        LOCAL_PANEL,
        "Replay a day of inference load in three minutes, with real trainings and a simulated fleet.",
    ),
    Subcommand("version", "cli.commands.about:version", LOCAL_PANEL, "Print the version of Ebbtide and of Python."),
    Subcommand("completion", "cli.completion:completion", LOCAL_PANEL, "Print a shell completion script."),
    Subcommand(
        "serve",
        "cli.commands.service:serve",
        SERVICE_PANEL,
        "Run the API, the controller and a node agent on this machine.",
    ),
    Subcommand("agent", "cli.commands.agent:agent", SERVICE_PANEL, "Run ranks on this machine."),
    Subcommand("operator", "cli.commands.service:operator", SERVICE_PANEL, "Run the Kubernetes operator."),
    Subcommand(
        "prepare-uninstall",
        "cli.commands.uninstall:prepare_uninstall",
        SERVICE_PANEL,
        "Release nodes and custom resources of a cluster before the operator is removed.",
    ),
    Subcommand(
        "assets",
        "cli.commands.assets:app",
        SERVICE_PANEL,
        "Export custom resource definitions, dashboards, alert rules and systemd units.",
    ),
    Subcommand("doctor", "cli.commands.doctor:doctor", SERVICE_PANEL, "Check settings, files, database and machine."),
    Subcommand(
        "backup",
        "cli.commands.backup:backup",
        SERVICE_PANEL,
        "Back up the database and its secrets to a file, while the service runs.",
    ),
    Subcommand(
        "restore",
        "cli.commands.backup:restore",
        SERVICE_PANEL,
        "Restore the database and its secrets from a backup.",
    ),
    Subcommand(
        "reset-clock", "cli.commands.doctor:reset_clock", SERVICE_PANEL, "Repair times that a wrong clock wrote."
    ),
    Subcommand("migrate", "cli.commands.service:migrate", SERVICE_PANEL, "Upgrade the database schema."),
    Subcommand(
        "export-trace", "cli.commands.service:export_trace", SERVICE_PANEL, "Export job history and demand as a trace."
    ),
    Subcommand("controller", "cli.commands.service:controller", SERVICE_PANEL, "Run the controller.", hidden=True),
    Subcommand("api", "cli.commands.service:api", SERVICE_PANEL, "Run the API server.", hidden=True),
)


def load_command(subcommand: Subcommand) -> Any:
    """Import the subcommand's module and return its click command."""
    module, _, attribute = subcommand.target.partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return get_group(target)
    single = typer.Typer(add_completion=False)
    single.command(subcommand.name, context_settings={"allow_interspersed_args": not subcommand.takes_command})(target)
    return get_command(single)


class EbbtideGroup(TyperGroup):
    """The root command. Its subcommands are placeholders for the overview; the one that is invoked is imported."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._subcommands = {each.name: each for each in SUBCOMMANDS}
        for each in SUBCOMMANDS:
            self.add_command(
                TyperCommand(
                    each.name, callback=None, help=each.summary, hidden=each.hidden, rich_help_panel=each.panel
                )
            )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the overview as plain text: importing rich for it would double the time that `ebbtide --help` takes."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        visible = [each for each in SUBCOMMANDS if not each.hidden]
        width = max(len(each.name) for each in visible)
        for panel in dict.fromkeys(each.panel for each in visible):
            rows = [(each.name.ljust(width), each.summary) for each in visible if each.panel == panel]
            with formatter.section(panel):
                formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("Run 'ebbtide COMMAND --help' for the options of a command.")

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, load_command(self._subcommands[name]) if name else placeholder, rest

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line. Every error ends the process with one message on stderr and an exit code.

        With `-o json`, the message is a JSON object.
        """
        if COMPLETE_VARIABLE in os.environ:
            from cli.completion import enable_completion

            enable_completion()
        try:
            exit_code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            _report(error, sys.argv[1:] if args is None else args)
            sys.exit(error.exit_code)
        except typer.Abort:
            _report(CommandError("aborted"), sys.argv[1:] if args is None else args)
            sys.exit(ExitCode.FAILED)
        sys.exit(exit_code if isinstance(exit_code, int) else 0)


def _report(error: typer.TyperException, words: Sequence[str]) -> None:
    message = _describe(error)
    typer.echo(format_error(error, message) if wants_json(words) else f"Error: {message}", err=True)


_OPTION_ADVICE = {
    ("submit", "--gpus"): "Use --min N and --max N; a job that is not elastic needs --min N alone.",
    ("scale", "--gpus"): "Use --min N, --max N or both.",
}
"""Replacements for options of other schedulers, by command."""


def _describe(error: typer.TyperException) -> str:
    """Return the error message. Adds the value of a rejected option, which typer's message omits."""
    option, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if advice := _OPTION_ADVICE.get((getattr(context, "info_name", ""), option)):
        return f"No such option: {option}. {advice}"
    message = error.format_message().replace("Value error, ", "")
    if isinstance(error, typer.BadParameter) and error.__cause__ is not None:
        from pydantic import ValidationError

        if isinstance(error.__cause__, ValidationError):
            value = str(error.__cause__.errors()[0]["input"])
            message = message if value in message else f"{message}, got '{value}'"
    return message


app = typer.Typer(
    cls=EbbtideGroup,
    name="ebbtide",
    help="Elastic GPU cluster scheduler: lends idle inference nodes to training and re-plans every job's parallelism.",
    pretty_exceptions_enable=False,
    add_completion=False,  # typer would guess the shell and add two options; `ebbtide completion SHELL` replaces both
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from scheduler.package_version import get_package_version

        typer.echo(f"ebbtide {get_package_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


@app.callback(invoke_without_command=True)
def show_help(context: typer.Context, is_version: VersionOption = False) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
