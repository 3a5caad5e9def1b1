"""Simulations that a service plays in the background."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.failure import Failed, refuse
from scheduler.cli.fleet import is_list
from scheduler.cli.humanise import clock
from scheduler.cli.inputs import text_of
from scheduler.cli.output import Format, OutputOption, columns, console, emit, facts, say
from scheduler.cli.service import DEFAULT_URL, UrlOption, service
from scheduler.cli.simulate import ClusterOption, DemandOption, JobsOption, PolicyOption, SeedOption, policy_names
from scheduler.cli.simulation_view import comparison
from scheduler.cli.watching import patiently

if TYPE_CHECKING:
    from rich.console import RenderableType

    from api.answers.simulations import SimulationView
    from api.client import Client

app = typer.Typer(name="simulations", help="Have the service play traces in the background, and get the reports.")

LOOK_S = 1.0
SimulationArgument = Annotated[str, typer.Argument(metavar="SIMULATION", help="Id of a simulation.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most simulations to show, newest first.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Stay until it has ended, and print the report.")]


@app.callback(invoke_without_command=True)
def simulations(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    if is_list(context):
        list_simulations(url=url, output=output)


@app.command("list")
def list_simulations(
    limit: LimitOption = 20, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE
) -> None:
    """List your simulations."""
    with service(url) as client:
        found = list(islice(client.simulations(limit=min(limit, 100)), limit))
    emit(found, output, lambda: _rows(found))


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
    output: OutputOption = Format.TABLE,
) -> None:
    """Hand in what `ebbtide simulate` takes; the service plays it."""
    if jobs is None or cluster is None:
        refuse(f"{'--jobs' if jobs is None else '--cluster'}: a file is needed")
    texts = {"jobs": _text(jobs), "cluster": _text(cluster), "demand": _text(demand) if demand else ""}
    with service(url) as client:
        made = client.create_simulation(**texts, policies=policy_names(policy), seed=seed)
        if watch:
            say(f"{made['id']} is handed in.")
            _print_report(client, made["id"], output)
            return
    emit(made, output, lambda: facts(_facts(made)))


@app.command("show")
def show_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE
) -> None:
    """One simulation: its state, and how far it is."""
    with service(url) as client:
        found = client.simulation(simulation)
    emit(found, output, lambda: facts(_facts(found)))


@app.command("watch")
def watch_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE
) -> None:
    """Stay until it has ended, with a progress bar, and print the report; exit 1 unless it succeeded."""
    with service(url) as client:
        _print_report(client, simulation, output)


@app.command("report")
def print_report(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE
) -> None:
    """The report of a simulation that succeeded, as `ebbtide simulate` prints it."""
    with service(url) as client:
        document = client.simulation_report(simulation)
    emit(document, output, lambda: comparison(document))


@app.command("cancel")
def cancel_simulation(
    simulation: SimulationArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE
) -> None:
    """Cancel a simulation that has not ended."""
    with service(url) as client:
        found = client.cancel_simulation(simulation)
    emit(found, output, lambda: facts({"simulation": f"{simulation} is cancelled"}))


def _print_report(client: Client, simulation: str, output: Format) -> None:
    ended = _watched(client, simulation)
    if ended["state"] != "succeeded":
        told = f": {ended['reason']}" if ended["reason"] else ""
        raise Failed(f"simulation {simulation} {'was ' * (ended['state'] == 'cancelled')}{ended['state']}{told}")
    document = client.simulation_report(simulation)
    emit(document, output, lambda: comparison(document))


def _watched(client: Client, simulation: str) -> SimulationView:
    """The simulation once it has ended; a bar on stderr shows how far it is, where that is a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    with Progress(*parts, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("waiting", total=1.0)
        while (found := patiently(partial(client.simulation, simulation)))["state"] in ("queued", "running"):
            playing = found["progress"]["playing"]
            bar.update(
                task,
                description=f"playing {playing}" if playing else found["state"],
                completed=found["progress"]["fraction"],
            )
            time.sleep(LOOK_S)
        return found


def _text(path: Path) -> str:
    """The text of a file, gzipped or plain. Raises BadInput for what cannot be read."""
    import gzip
    import zlib

    if path.suffix != ".gz":
        return text_of(str(path))
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as wrong:
        refuse(f"{path}: cannot be read: {getattr(wrong, 'strerror', None) or wrong}")


def _facts(found: Mapping[str, Any]) -> dict[str, str]:
    progress = found["progress"]
    told = {"simulation": found["id"], "is": found["state"] + (f": {found['reason']}" if found["reason"] else "")}
    if found["state"] == "running":
        told["plays"] = f"{progress['playing'] or 'nothing yet'}, {progress['fraction']:.0%} done"
    return told | {"policies": ", ".join(found["policies"]), "seed": str(found["seed"]), "owner": found["owner"]}


def _rows(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = (
        [
            each["id"],
            each["state"],
            f"{each['progress']['fraction']:.0%}",
            ", ".join(each["policies"]),
            str(each["seed"]),
            clock(each["created_at_s"]),
            each["owner"],
        ]
        for each in found
    )
    heads = ["simulation", "state", "done", "policies", "seed", "handed in", "owner"]
    return columns(rows, heads=heads, right=["done", "seed"], empty="There are no simulations.")
