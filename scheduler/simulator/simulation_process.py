"""The files of a simulation that was handed in: written where `ebbtide simulate`'s readers find them, and checked.

`python -m scheduler.simulator.simulation_process FOLDER`: plays the simulation whose files lie there, in a process of its own.

In the folder are jobs.csv, demand.csv (where there is one), cluster.yaml and task.json: policies, seed, and what the
process may take. It writes progress.json while it plays, then report.json, or failure.txt where the simulation itself
cannot be played. It gives way to everything else, and ends with its parent, whose end closes its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.documents.plain_json import to_plain_json
from scheduler.domain.simulation_task import SimulationFiles
from scheduler.executors.disk_writes import write_json_atomically
from scheduler.simulator.demand import build_demand_traces
from scheduler.simulator.seed_sweep import simulate_seeds
from scheduler.simulator.simulate import PolicyError, SimulationInputs, load_inputs, resolve_policy_sets
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.workloads import build_submissions

JOBS_FILE, DEMAND_FILE, CLUSTER_FILE = "jobs.csv", "demand.csv", "cluster.yaml"


def write_input_files(files: SimulationFiles, folder: Path) -> None:
    texts = {JOBS_FILE: files.jobs, DEMAND_FILE: files.demand, CLUSTER_FILE: files.cluster}
    for name, text in texts.items():
        if text or name != DEMAND_FILE:
            # Newlines as they were handed in, and whatever a JSON string may hold that UTF-8 has no form for.
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def read_input_files(folder: Path) -> SimulationInputs:
    """Raises ValueError, as `load_inputs`; files are named as they are called in the folder."""
    demand = folder / DEMAND_FILE
    try:
        return load_inputs(folder / JOBS_FILE, demand if demand.exists() else None, folder / CLUSTER_FILE)
    except ValueError as wrong:
        raise ValueError(strip_folder(str(wrong), folder)) from None


def strip_folder(message: str, folder: Path) -> str:
    return message.replace(f"{folder}/", "")


def validate_input_files(files: SimulationFiles, policies: Sequence[str]) -> int:
    """How many jobs the trace has, once all has been checked that needs no plan to be solved.

    Raises:
        ValueError: something is wrong; the message names file, line, field, value and what is allowed.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-simulation-") as name:
        folder = Path(name)
        write_input_files(files, folder)
        inputs = read_input_files(folder)
        try:
            elastic = all(one.scales for one in resolve_policy_sets(policies, inputs.cluster))
            build_demand_traces(inputs.demand, inputs.cluster)
            build_submissions(
                [replace(row, model="") for row in inputs.jobs], inputs.cluster, CurveCache(), elastic=elastic
            )
        except ValueError as wrong:
            raise ValueError(strip_folder(str(wrong), folder)) from None
        return len(inputs.jobs)


TASK_FILE, PROGRESS_FILE, REPORT_FILE, FAILURE_FILE = "task.json", "progress.json", "report.json", "failure.txt"
NICENESS = 10
PROGRESS_INTERVAL_S = 0.5


def main(folder: Path) -> int:
    asked = json.loads((folder / TASK_FILE).read_text())
    threading.Thread(target=_exit_with_parent, args=(folder,), daemon=True).start()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_s"], asked["cpu_s"] + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        write_json_atomically(folder / REPORT_FILE, _run_simulation(folder, asked["policies"], asked["seed"]))
    except (ValueError, PolicyError) as wrong:
        return _write_failure(folder, strip_folder(str(wrong), folder))
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # to say so takes some
        return _write_failure(folder, f"it needs more memory than the {asked['memory_bytes']} bytes that it may have")
    return 0


def _run_simulation(folder: Path, policies: Sequence[str], seed: int) -> Any:
    """What `ebbtide simulate -o json` prints."""
    inputs = read_input_files(folder)
    (report,) = simulate_seeds(
        inputs, policies, (seed,), progress=_make_progress_writer(folder, policies, len(inputs.jobs))
    )
    return to_plain_json(report.to_json())


def _make_progress_writer(folder: Path, policies: Sequence[str], jobs: int) -> Callable[[int, int], None]:
    told_s = -PROGRESS_INTERVAL_S

    def tell(done: int, total: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= PROGRESS_INTERVAL_S:
            told_s = time.monotonic()
            playing = policies[min(done // jobs, len(policies) - 1)]
            write_json_atomically(folder / PROGRESS_FILE, {"playing": playing, "jobs_done": done})

    tell(0, 0)
    return tell


def _write_failure(folder: Path, why: str) -> int:
    (folder / FAILURE_FILE).write_text(why)
    return 1


def _exit_with_parent(folder: Path) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
