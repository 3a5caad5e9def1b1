"""`ebbtide demo`: replays one real day of inference demand in minutes, with real training processes.

The scenario reports demand to a real service, submits two jobs, prints the events, and checks the result.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cli.commands.console import format_login_url
from cli.demo.checks import CheckResult, TrainingRun, check_events, check_leftover_processes, check_training
from cli.demo.service_process import DemoError, DemoService
from ebbtide.client import Client
from scheduler.documents.trace_files import read_demand
from scheduler.forecast.demand_history import fill_gaps

if TYPE_CHECKING:
    from ebbtide.client.views import EventView


SECONDS_PER_DAY = 86_400.0
HISTORY_DAYS = 7
_TRACE_FILE = Path(__file__).parent / "data" / "servegen_m_small_8days.csv.gz"


@dataclass(frozen=True, slots=True)
class DemandSample:
    """Demand in GPUs at a time in seconds from the start of the replayed day. History has negative times."""

    at_s: float
    gpus: float


@dataclass(frozen=True, slots=True)
class DemandTrace:
    """Seven days of history and the day to replay, with time compressed so that one day lasts `day_s` seconds."""

    day_s: float
    history: tuple[DemandSample, ...]
    today: tuple[DemandSample, ...]


def load_demand_trace(*, day_s: float, peak_gpus: float) -> DemandTrace:
    """Return eight days of ServeGen's m_small, scaled so that the peak load needs `peak_gpus` GPUs."""
    rows = read_demand(_TRACE_FILE)
    load = fill_gaps(np.array([row.amount for row in rows], dtype=np.float64))
    gpus = peak_gpus * load / load.max()
    pace = day_s / SECONDS_PER_DAY
    at_s = [(row.time_s - HISTORY_DAYS * SECONDS_PER_DAY) * pace for row in rows]
    readings = tuple(DemandSample(at, float(need)) for at, need in zip(at_s, gpus, strict=True))
    return DemandTrace(day_s, tuple(r for r in readings if r.at_s < 0), tuple(r for r in readings if r.at_s >= 0))


_EVENT_COLORS = {
    "NodeLent": "cyan",
    "LoanActive": "cyan",
    "JobStarted": "green",
    "JobGrown": "bold green",
    "NodeRecalled": "bold yellow",
    "NodeRecallCancelled": "yellow",
    "JobShrunk": "yellow",
    "JobMoved": "yellow",
    "NodeReturned": "bold cyan",
    "JobPreempted": "red",
    "JobLostWork": "bold red",
    "Breach": "bold red",
    "DecisionDropped": "bold red",
}
_EVENT_LABELS = {
    "NodeLent": "lent",
    "LoanActive": "serves training",
    "JobStarted": "started",
    "JobGrown": "grown",
    "NodeRecalled": "recalled",
    "NodeRecallCancelled": "recall cancelled",
    "JobShrunk": "shrunk",
    "JobMoved": "moved",
    "NodeReturned": "returned",
    "JobPreempted": "preempted",
    "JobLostWork": "lost work",
    "Breach": "breach",
    "DecisionDropped": "decision dropped",
}


class EventPrinter:
    """Printer of new events of the service. It remembers the last event number, so that no event is printed twice."""

    def __init__(self, console: Console, client: Client, *, started_at_s: float) -> None:
        self.events: list[EventView] = []
        self._console = console
        self._client = client
        self._started_at_s = started_at_s

    def print_new_events(self) -> None:
        after = self.events[-1]["number"] if self.events else 0
        new_events = list(self._client.events(after=after))
        self.events.extend(new_events)
        self._print_events(new_events)

    def _print_events(self, events: Iterable[EventView]) -> None:
        for event in events:
            code, message = event["code"], event["message"]
            if code == "JobState" and message.partition("->")[2].split(":")[0].strip() in ("succeeded", "failed"):
                self._print_line(event, "finished", "bold green", message)
            elif code in _EVENT_LABELS:
                self._print_line(event, _EVENT_LABELS[code], _EVENT_COLORS[code], message)

    def _print_line(self, event: EventView, word: str, color: str, message: str) -> None:
        at_s = max(0.0, event["at_s"] - self._started_at_s)
        self._console.print(
            f"[dim]{at_s:5.0f} s[/dim]  [{color}]{word:<16}[/{color}] {event['subject']:<22} {message}",
            highlight=False,
            soft_wrap=True,
        )


DEMO_DAY_S = 140.0
PEAK_GPUS = 1.6
GLOBAL_BATCH = 12
POOL = "inference"
LENDING = {"quantile": 0.95, "headroom": 0.0, "return_deadline_s": 15.0, "cold_start_s": 3.0}
SETTINGS = {
    "EBBTIDE_FULL_PASS_PERIOD_S": "2",
    "EBBTIDE_RECONFIGURATION_S": "1",
    "EBBTIDE_RESIZE_PAUSE_S": "4",
    "EBBTIDE_LEAVE_GRACE_S": "20",
    "EBBTIDE_TICK_S_MAX": "0.5",
    "EBBTIDE_SEASON_S": str(DEMO_DAY_S),
    "EBBTIDE_LOG_LEVEL": "WARNING",
}
JOBS = {
    "elastic": {"gpus": {"min": 1, "max": 4}, "steps": 250, "step_delay_s": 0.25},
    "inelastic": {"gpus": {"min": 1, "max": 1}, "steps": 90, "step_delay_s": 0.6},
}
JOBS_TIMEOUT_S = 150.0
HISTORY_LEAD_S = 15.0
PICTURE_WIDTH = 165
# rich references a web font in the SVG. Removing it keeps the picture free of external requests.
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def run_demo(*, picture: Path | None = None) -> int:
    """Run the demo. Return 0 if every check passed, else 1. `picture` is an SVG file to save the output in."""
    console = Console(highlight=False, record=picture is not None, width=PICTURE_WIDTH if picture else None)
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-demo-"))
    console.print(f"[bold]Ebbtide demo[/bold]: one real day of inference demand in {DEMO_DAY_S:.0f} s. Files: {folder}")
    # Turn SIGTERM into SystemExit, so that `finally` stops the service and its workers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    service = DemoService(folder, SETTINGS)
    try:
        results = _run_scenario(console, service)
        if os.environ.get("DEMO_KEEP") == "1":
            console.print(_render_results(results))
            _keep_service(console, service)
    except DemoError as error:
        console.print(f"[bold red]The demo failed:[/bold red] {error}")
        return 1
    finally:
        service.stop()
    results = [*results, check_leftover_processes(service.find_leftover_processes())]
    console.print(_render_results(results))
    if picture is not None:
        svg = console.export_svg(title="make demo")
        picture.write_text(_WEB_FONTS.sub("", svg))
    return 0 if all(result.passed for result in results) else 1


def _run_scenario(console: Console, service: DemoService) -> list[CheckResult]:
    client = service.wait_until_ready()
    console.print(f"The API listens on {service.url}. Fleet: 3 training GPUs, 2 inference nodes with 1 GPU each.")
    _create_fleet(client)
    trace = load_demand_trace(day_s=DEMO_DAY_S, peak_gpus=PEAK_GPUS)
    started_at_s = _report_history(client, trace)
    console.print(f"{len(trace.history)} readings of the previous seven days reported. The day starts.")
    jobs = {name: _submit_job(client, service, name, job) for name, job in JOBS.items()}
    event_printer = EventPrinter(console, client, started_at_s=started_at_s)
    _replay_demand(client, event_printer, trace, started_at_s)
    _wait_for_jobs(client, event_printer, list(jobs.values()))
    console.print("Both jobs have succeeded. Running the same trainings again without interruption for comparison.")
    results = list(check_events(event_printer.events))
    with ThreadPoolExecutor(len(JOBS)) as executor:
        for training in executor.map(partial(_run_reference, service), JOBS):
            results.extend(check_training(training))
    console.print(_render_jobs(client, jobs))
    return results


def _create_fleet(client: Client) -> None:
    client.create_pool({"name": "training", "kind": "training"})
    client.create_pool({"name": POOL, "kind": "inference", "lending": LENDING})
    for name, pool, gpus in (("t0", "training", 2), ("t1", "training", 1), ("i0", POOL, 1), ("i1", POOL, 1)):
        client.add_node({"name": name, "pool": pool, "gpu": "cpu", "gpus": gpus})


def _report_history(client: Client, trace: DemandTrace) -> float:
    """Report the seven days of history and return the Unix time at which the replayed day starts.

    The service rejects readings from the future, so the last readings are reported when they are due. Lending is
    paused until then.
    """
    client.pause_lending()
    started_at_s = time.time() + HISTORY_LEAD_S
    for reading in trace.history:
        time.sleep(max(0.0, started_at_s + reading.at_s - time.time()))
        client.report_demand(POOL, gpus=reading.gpus, at_s=started_at_s + reading.at_s)
    client.resume_lending()
    return started_at_s


def _submit_job(client: Client, service: DemoService, name: str, job: Mapping[str, Any]) -> str:
    document = {
        "name": name,
        "gpus": job["gpus"],
        "model": "tiny-gpt",
        "globalBatch": GLOBAL_BATCH,
        "steps": job["steps"],
        "onResize": "checkpoint",
        "command": ["python", *_build_trainer_arguments(name, job, service.ledgers / name)],
    }
    return str(client.submit(document)["id"])


def _build_trainer_arguments(name: str, job: Mapping[str, Any], ledger: Path, *, delay: bool = True) -> list[str]:
    seed = list(JOBS).index(name)
    pause = ["--step-delay-s", str(job["step_delay_s"])] if delay else []
    options = ["--model", "tiny-gpt", "--steps", str(job["steps"]), "--global-batch", str(GLOBAL_BATCH)]
    return ["-m", "scheduler.trainer.train", *options, "--seed", str(seed), "--ledger", str(ledger), *pause]


def _replay_demand(client: Client, event_printer: EventPrinter, trace: DemandTrace, started_at_s: float) -> None:
    for reading in trace.today:
        _sleep_until(started_at_s + reading.at_s, event_printer)
        client.report_demand(POOL, gpus=reading.gpus)
    _sleep_until(started_at_s + trace.day_s, event_printer)


def _sleep_until(at_s: float, event_printer: EventPrinter) -> None:
    event_printer.print_new_events()
    time.sleep(max(0.0, at_s - time.time()))


def _wait_for_jobs(client: Client, event_printer: EventPrinter, jobs: list[str]) -> None:
    deadline_s = time.time() + JOBS_TIMEOUT_S
    while True:
        event_printer.print_new_events()
        states = {job_id: client.job(job_id)["state"] for job_id in jobs}
        if all(state == "succeeded" for state in states.values()):
            return
        if "failed" in states.values() or time.time() > deadline_s:
            raise DemoError(f"not every job succeeded: {states}")
        time.sleep(0.5)


def _run_reference(service: DemoService, name: str) -> TrainingRun:
    """Run the same training uninterrupted on one rank and without delays."""
    job: Mapping[str, Any] = JOBS[name]
    folder = service.folder / "reference" / name
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EBBTIDE_")}
    folder.mkdir(parents=True)
    with (folder / "train.log").open("wb") as log:
        command = [sys.executable, *_build_trainer_arguments(name, job, folder, delay=False)]
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise DemoError(f"the uninterrupted run of {name} failed; see {log.name}")
    return TrainingRun(name, job["steps"], GLOBAL_BATCH, service.ledgers / name, folder)


def _keep_service(console: Console, service: DemoService) -> None:
    with service.wait_until_ready() as client:
        login_url = format_login_url(service.url, client.create_login_code()["code"])
    console.print(f"DEMO_KEEP=1: the service keeps running until Ctrl-C. This URL opens its console: {login_url}")
    try:
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        console.print("Stopping.")


def _render_jobs(client: Client, jobs: Mapping[str, str]) -> Table:
    table = Table(title="Jobs", title_justify="left")
    for head in ("job", "state", "steps", "resizes", "preemptions", "time pending", "GPU-seconds", "lost GPU-seconds"):
        table.add_column(head)
    for name, job_id in jobs.items():
        job = client.job(job_id)
        account = job["account"]
        table.add_row(
            name,
            job["state"],
            f"{job['progress']['steps']:.0f}",
            str(account["resizes"]),
            str(account["preemptions"]),
            f"{account['waited_s']:.1f} s",
            f"{account['gpu_s']:.0f}",
            f"{account['lost_gpu_s']:.0f}",
        )
    return table


def _render_results(results: list[CheckResult]) -> Table:
    table = Table(title="Checks", title_justify="left")
    for head in ("check", "passed", "observed"):
        table.add_column(head)
    for result in results:
        passed = "[green]yes[/green]" if result.passed else "[bold red]NO[/bold red]"
        table.add_row(result.expectation, passed, result.observed)
    return table
