"""Simulations that a service plays in the background."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.fleet import has_no_subcommand
from cli.commands.simulate import ClusterOption, DemandOption, JobsOption, PolicyOption, SeedOption, parse_policies
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import CommandError, raise_input_error, read_text
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

    from api.client import Client
    from api.simulations import SimulationView


app = typer.Typer(name="simulations", help="Have the service play traces in the background, and get the reports.")

POLL_INTERVAL_S = 1.0
SimulationArgument = Annotated[str, typer.Argument(metavar="SIMULATION", help="Id of a simulation.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most simulations to show, newest first.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Stay until it has ended, and print the report.")]


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
        found = list(islice(client.simulations(limit=min(limit, 100)), limit))
    print_document(found, output, lambda: _render_simulations(found))


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
    """Hand in what `ebbtide simulate` takes; the service plays it."""
    if jobs is None or cluster is None:
        raise_input_error(f"{'--jobs' if jobs is None else '--cluster'}: a file is needed")
    texts = {
        "jobs": _read_trace(jobs),
        "cluster": _read_trace(cluster),
        "demand": _read_trace(demand) if demand else "",
    }
    with service_client(url) as client:
        made = client.create_simulation(**texts, policies=parse_policies(policy), seed=seed)
        if watch:
            print_message(f"{made['id']} is handed in.")
            _wait_and_print_report(client, made["id"], output)
            return
    print_document(made, output, lambda: render_facts(_simulation_facts(made)))


@app.command("show")
def show_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """One simulation: its state, and how far it is."""
    with service_client(url) as client:
        found = client.simulation(simulation)
    print_document(found, output, lambda: render_facts(_simulation_facts(found)))


@app.command("watch")
def watch_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Stay until it has ended, with a progress bar, and print the report; exit 1 unless it succeeded."""
    with service_client(url) as client:
        _wait_and_print_report(client, simulation, output)


@app.command("report")
def print_report(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """The report of a simulation that succeeded, as `ebbtide simulate` prints it."""
    with service_client(url) as client:
        document = client.simulation_report(simulation)
    print_document(document, output, lambda: render_comparison(document))


@app.command("cancel")
def cancel_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Cancel a simulation that has not ended."""
    with service_client(url) as client:
        found = client.cancel_simulation(simulation)
    print_document(found, output, lambda: render_facts({"simulation": f"{simulation} is cancelled"}))


def _wait_and_print_report(client: Client, simulation: str, output: OutputFormat) -> None:
    ended = _wait_for_end(client, simulation)
    if ended["state"] != "succeeded":
        told = f": {ended['reason']}" if ended["reason"] else ""
        raise CommandError(f"simulation {simulation} {'was ' * (ended['state'] == 'cancelled')}{ended['state']}{told}")
    document = client.simulation_report(simulation)
    print_document(document, output, lambda: render_comparison(document))


def _wait_for_end(client: Client, simulation: str) -> SimulationView:
    """The simulation once it has ended; a bar on stderr shows how far it is, where that is a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    screen = make_console(stderr=True)
    with Progress(*parts, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("waiting", total=1.0)
        while (found := retry_while_unavailable(partial(client.simulation, simulation)))["state"] in (
            "queued",
            "running",
        ):
            playing = found["progress"]["playing"]
            bar.update(
                task,
                description=f"playing {playing}" if playing else found["state"],
                completed=found["progress"]["fraction"],
            )
            time.sleep(POLL_INTERVAL_S)
        return found


def _read_trace(path: Path) -> str:
    """The text of a file, gzipped or plain. Raises BadInput for what cannot be read."""
    import gzip
    import zlib

    if path.suffix != ".gz":
        return read_text(str(path))
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as wrong:
        raise_input_error(f"{path}: cannot be read: {getattr(wrong, 'strerror', None) or wrong}")


def _simulation_facts(simulation: Mapping[str, Any]) -> dict[str, str]:
    progress = simulation["progress"]
    told = {
        "simulation": simulation["id"],
        "is": simulation["state"] + (f": {simulation['reason']}" if simulation["reason"] else ""),
    }
    if simulation["state"] == "running":
        told["plays"] = f"{progress['playing'] or 'nothing yet'}, {progress['fraction']:.0%} done"
    return told | {
        "policies": ", ".join(simulation["policies"]),
        "seed": str(simulation["seed"]),
        "owner": simulation["owner"],
    }


def _render_simulations(found: Iterable[Mapping[str, Any]]) -> RenderableType:
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
        for each in found
    )
    heads = ["simulation", "state", "done", "policies", "seed", "handed in", "owner"]
    return render_table(rows, headers=heads, right_aligned=["done", "seed"], empty="There are no simulations.")
