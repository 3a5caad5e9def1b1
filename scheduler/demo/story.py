"""`ebbtide demo`: one real day of inference load in minutes, with real training processes riding on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from api.client import Client
from scheduler.demo.narrator import Narrator
from scheduler.demo.service import DemoError, DemoService
from scheduler.demo.tide import Tide, real_tide
from scheduler.demo.verdict import Finding, Training, process_finding, story_findings, training_findings

DAY_S = 140.0
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
    "EBBTIDE_SEASON_S": str(DAY_S),
    "EBBTIDE_LOG_LEVEL": "WARNING",
}
JOBS = {
    "elastic": {"gpus": {"min": 1, "max": 4}, "steps": 250, "step_delay_s": 0.25},
    "inelastic": {"gpus": {"min": 1, "max": 1}, "steps": 90, "step_delay_s": 0.6},
}
FINISHED_WITHIN_S = 150.0
HISTORY_TAKES_S = 15.0
PICTURE_COLUMNS = 165
# A picture of ours loads nothing from elsewhere; any monospaced font will do.
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def run(*, picture: Path | None = None) -> int:
    """Play the demo. 0 when every promise was kept, 1 otherwise. `picture`: an SVG of all that it printed."""
    console = Console(highlight=False, record=picture is not None, width=PICTURE_COLUMNS if picture else None)
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-demo-"))
    console.print(f"[bold]Ebbtide demo[/bold]: one real day of inference load in {DAY_S:.0f} s. Files: {folder}")
    # A demo that is told to end unwinds like any other, so that its service and workers end with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    service = DemoService(folder, SETTINGS)
    try:
        findings = _play(console, service)
        if os.environ.get("DEMO_KEEP") == "1":
            console.print(_verdict_table(findings))
            _keep(console, service)
    except DemoError as stopped:
        console.print(f"[bold red]The demo stopped:[/bold red] {stopped}")
        return 1
    finally:
        service.stop()
    findings = [*findings, process_finding(service.left_processes())]
    console.print(_verdict_table(findings))
    if picture is not None:
        svg = console.export_svg(title="make demo")
        picture.write_text(_WEB_FONTS.sub("", svg))
    return 0 if all(finding.kept for finding in findings) else 1


def _play(console: Console, service: DemoService) -> list[Finding]:
    client = service.wait_until_ready()
    console.print(f"The API answers at {service.url}: 3 training slots, 2 inference nodes of 1 slot.")
    _create_fleet(client)
    tide = real_tide(day_s=DAY_S, peak_gpus=PEAK_GPUS)
    started_at_s = _report_history(client, tide)
    console.print(f"{len(tide.history)} readings of the seven days before are known. The day begins.")
    jobs = {name: _submit(client, service, name, job) for name, job in JOBS.items()}
    narrator = Narrator(console, client, started_at_s=started_at_s)
    _replay(client, narrator, tide, started_at_s)
    _wait_for_jobs(client, narrator, list(jobs.values()))
    console.print("Both jobs are done. The same trainings run again, uninterrupted and alone, to compare.")
    findings = list(story_findings(narrator.events))
    with ThreadPoolExecutor(len(JOBS)) as side_by_side:
        for training in side_by_side.map(partial(_reference, service), JOBS):
            findings.extend(training_findings(training))
    console.print(_job_table(client, jobs))
    return findings


def _create_fleet(client: Client) -> None:
    client.create_pool({"name": "training", "kind": "training"})
    client.create_pool({"name": POOL, "kind": "inference", "lending": LENDING})
    for name, pool, gpus in (("t0", "training", 2), ("t1", "training", 1), ("i0", POOL, 1), ("i1", POOL, 1)):
        client.add_node({"name": name, "pool": pool, "gpu": "cpu", "gpus": gpus})


def _report_history(client: Client, tide: Tide) -> float:
    """Make the seven days before known, in order; gives the time at which today begins.

    Readings cannot lie in the future, so the last of them are told as they fall due. Nothing is lent meanwhile.
    """
    client.pause_lending()
    started_at_s = time.time() + HISTORY_TAKES_S
    for reading in tide.history:
        time.sleep(max(0.0, started_at_s + reading.at_s - time.time()))
        client.report_demand(POOL, gpus=reading.gpus, at_s=started_at_s + reading.at_s)
    client.resume_lending()
    return started_at_s


def _submit(client: Client, service: DemoService, name: str, job: Mapping[str, Any]) -> str:
    document = {
        "name": name,
        "gpus": job["gpus"],
        "model": "tiny-gpt",
        "globalBatch": GLOBAL_BATCH,
        "steps": job["steps"],
        "command": ["python", *_trainer(name, job, service.folder / "ledger" / name)],
    }
    return str(client.submit(document)["id"])


def _trainer(name: str, job: Mapping[str, Any], ledger: Path, *, delay: bool = True) -> list[str]:
    seed = list(JOBS).index(name)
    pause = ["--step-delay-s", str(job["step_delay_s"])] if delay else []
    options = ["--model", "tiny-gpt", "--steps", str(job["steps"]), "--global-batch", str(GLOBAL_BATCH)]
    return ["-m", "scheduler.worker.train", *options, "--seed", str(seed), "--ledger", str(ledger), *pause]


def _replay(client: Client, narrator: Narrator, tide: Tide, started_at_s: float) -> None:
    for reading in tide.today:
        _sleep_until(started_at_s + reading.at_s, narrator)
        client.report_demand(POOL, gpus=reading.gpus)
    _sleep_until(started_at_s + tide.day_s, narrator)


def _sleep_until(at_s: float, narrator: Narrator) -> None:
    narrator.tell_news()
    time.sleep(max(0.0, at_s - time.time()))


def _wait_for_jobs(client: Client, narrator: Narrator, jobs: list[str]) -> None:
    give_up_at_s = time.time() + FINISHED_WITHIN_S
    while True:
        narrator.tell_news()
        states = {job_id: client.job(job_id)["state"] for job_id in jobs}
        if all(state == "succeeded" for state in states.values()):
            return
        if "failed" in states.values() or time.time() > give_up_at_s:
            raise DemoError(f"not every job succeeded: {states}")
        time.sleep(0.5)


def _reference(service: DemoService, name: str) -> Training:
    """The same training on one rank that nobody disturbs, and without the pauses."""
    job: Mapping[str, Any] = JOBS[name]
    folder = service.folder / "reference" / name
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EBBTIDE_")}
    folder.mkdir(parents=True)
    with (folder / "train.log").open("wb") as log:
        command = [sys.executable, *_trainer(name, job, folder, delay=False)]
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise DemoError(f"the uninterrupted run of {name} failed; see {log.name}")
    return Training(name, job["steps"], GLOBAL_BATCH, service.folder / "ledger" / name, folder)


def _keep(console: Console, service: DemoService) -> None:
    console.print(f"DEMO_KEEP=1: the API stays at {service.url} until Ctrl-C.")
    try:
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        console.print("Ending.")


def _job_table(client: Client, jobs: Mapping[str, str]) -> Table:
    table = Table(title="Jobs", title_justify="left")
    for head in ("job", "state", "steps", "resizes", "preempted", "waited", "GPU-seconds", "lost GPU-seconds"):
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


def _verdict_table(findings: list[Finding]) -> Table:
    table = Table(title="Verdict", title_justify="left")
    for head in ("promise", "kept", "seen"):
        table.add_column(head)
    for finding in findings:
        kept = "[green]yes[/green]" if finding.kept else "[bold red]NO[/bold red]"
        table.add_row(finding.promise, kept, finding.seen)
    return table
