"""`ebbtide simulations`: runs simulations on the service and prints their reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.simulate import ClusterOption, DemandOption, JobsOption, PolicyOption, SeedOption, parse_policies
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import CommandError
from cli.inputs import has_no_subcommand, raise_input_error, read_text
from cli.output import (
    OutputFormat,
    OutputOption,
    format_time,
    make_console,
    print_document,
    print_message,
    render_facts,
    render_table,
    retry_while_unavailable,
)
from cli.simulation.comparison_table import render_comparison

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ebbtide.client import Client
    from ebbtide.client.views import SimulationView


app = typer.Typer(name="simulations", help="Run simulations on the service.")

POLL_INTERVAL_S = 1.0
SimulationArgument = Annotated[str, typer.Argument(metavar="SIMULATION", help="Simulation ID.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most simulations to list, newest first.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Wait until it ends and print the report.")]


@app.callback(invoke_without_command=True)
def simulations(
    context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    if has_no_subcommand(context):
        list_simulations(url=url, output=output)


@app.command("list")
def list_simulations(
    limit: LimitOption = 20, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """List your simulations."""
    with service_client(url) as client:
        result = list(islice(client.simulations(limit=min(limit, 100)), limit))
    print_document(result, output, lambda: _render_simulations(result))


@app.command("submit")
def submit_simulation(
    *,
    jobs: JobsOption = None,
    demand: DemandOption = None,
    cluster: ClusterOption = None,
    policy: PolicyOption = "ebbtide",
    seed: SeedOption = 0,
    watch: WatchOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Submit a simulation with the input files of `ebbtide simulate`."""
    if jobs is None or cluster is None:
        raise_input_error(f"{'--jobs' if jobs is None else '--cluster'}: a file is required")
    texts = {
        "jobs": _read_trace(jobs),
        "cluster": _read_trace(cluster),
        "demand": _read_trace(demand) if demand else "",
    }
    with service_client(url) as client:
        created = client.create_simulation(**texts, policies=parse_policies(policy), seed=seed)
        if watch:
            print_message(f"{created['id']} submitted.")
            _wait_and_print_report(client, created["id"], output)
            return
    print_document(created, output, lambda: render_facts(_simulation_facts(created)))


@app.command("show")
def show_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Show the state and progress of a simulation."""
    with service_client(url) as client:
        result = client.simulation(simulation)
    print_document(result, output, lambda: render_facts(_simulation_facts(result)))


@app.command("watch")
def watch_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Wait until a simulation ends, show its progress, and print the report. Exit 1 unless it succeeded."""
    with service_client(url) as client:
        _wait_and_print_report(client, simulation, output)


@app.command("report")
def print_report(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Print the report of a simulation that succeeded, in the format of `ebbtide simulate`."""
    with service_client(url) as client:
        document = client.simulation_report(simulation)
    print_document(document, output, lambda: render_comparison(document))


@app.command("cancel")
def cancel_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Cancel a simulation that has not ended."""
    with service_client(url) as client:
        result = client.cancel_simulation(simulation)
    print_document(result, output, lambda: render_facts({"simulation": f"{simulation} cancelled"}))


def _wait_and_print_report(client: Client, simulation: str, output: OutputFormat) -> None:
    ended = _wait_for_end(client, simulation)
    if ended["state"] != "succeeded":
        reason = f": {ended['reason']}" if ended["reason"] else ""
        raise CommandError(
            f"simulation {simulation} {'was ' * (ended['state'] == 'cancelled')}{ended['state']}{reason}"
        )
    document = client.simulation_report(simulation)
    print_document(document, output, lambda: render_comparison(document))


def _wait_for_end(client: Client, simulation: str) -> SimulationView:
    """Return the simulation once it has ended. Shows a progress bar if stderr is a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    screen = make_console(stderr=True)
    with Progress(*parts, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("waiting", total=1.0)
        while (result := retry_while_unavailable(partial(client.simulation, simulation)))["state"] in (
            "queued",
            "running",
        ):
            playing = result["progress"]["playing"]
            bar.update(
                task,
                description=f"playing {playing}" if playing else result["state"],
                completed=result["progress"]["fraction"],
            )
            time.sleep(POLL_INTERVAL_S)
        return result


def _read_trace(path: Path) -> str:
    """Return the text of a plain or gzip-compressed file. Raises InputError if it cannot be read."""
    import gzip
    import zlib

    if path.suffix != ".gz":
        return read_text(str(path))
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise_input_error(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _simulation_facts(simulation: Mapping[str, Any]) -> dict[str, str]:
    progress = simulation["progress"]
    facts = {
        "simulation": simulation["id"],
        "state": simulation["state"] + (f": {simulation['reason']}" if simulation["reason"] else ""),
    }
    if simulation["state"] == "running":
        facts["running"] = f"{progress['playing'] or 'not started'}, {progress['fraction']:.0%} done"
    return facts | {
        "policies": ", ".join(simulation["policies"]),
        "seed": str(simulation["seed"]),
        "owner": simulation["owner"],
    }


def _render_simulations(result: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = (
        [
            each["id"],
            each["state"],
            f"{each['progress']['fraction']:.0%}",
            ", ".join(each["policies"]),
            str(each["seed"]),
            format_time(each["created_at_s"]),
            each["owner"],
        ]
        for each in result
    )
    heads = ["simulation", "state", "done", "policies", "seed", "submitted", "owner"]
    return render_table(rows, headers=heads, right_aligned=["done", "seed"], empty="There are no simulations.")
