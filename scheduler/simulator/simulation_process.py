"""`python -m scheduler.simulator.simulation_process FOLDER`: runs a submitted simulation in its own process.

The folder contains jobs.csv, cluster.yaml, optionally demand.csv, and task.json with policies, seed and limits. The
process writes progress.json while it runs, then report.json, or failure.txt if the input is not valid. It has a low
priority and exits with its parent, whose end closes its standard input.
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
TASK_FILE, PROGRESS_FILE, REPORT_FILE, FAILURE_FILE = "task.json", "progress.json", "report.json", "failure.txt"
NICENESS = 10
PROGRESS_INTERVAL_S = 0.5


def write_input_files(files: SimulationFiles, folder: Path) -> None:
    texts = {JOBS_FILE: files.jobs, DEMAND_FILE: files.demand, CLUSTER_FILE: files.cluster}
    for name, text in texts.items():
        if text or name != DEMAND_FILE:
            # Bytes keep the newlines of the client; surrogatepass encodes all texts that JSON can contain.
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def read_input_files(folder: Path) -> SimulationInputs:
    """Read and check the files of the folder. Errors (ValueError) name files without the folder."""
    demand = folder / DEMAND_FILE
    try:
        return load_inputs(folder / JOBS_FILE, demand if demand.exists() else None, folder / CLUSTER_FILE)
    except ValueError as error:
        raise ValueError(strip_folder(str(error), folder)) from None


def strip_folder(message: str, folder: Path) -> str:
    return message.replace(f"{folder}/", "")


def validate_input_files(files: SimulationFiles, policies: Sequence[str]) -> int:
    """Check everything that needs no solved plan, and return the number of jobs in the trace.

    Raises:
        ValueError: the input is not valid. The message names file, line, field, value and accepted values.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-simulation-") as name:
        folder = Path(name)
        write_input_files(files, folder)
        inputs = read_input_files(folder)
        try:
            elastic = all(each.scales for each in resolve_policy_sets(policies, inputs.cluster))
            build_demand_traces(inputs.demand, inputs.cluster)
            build_submissions(
                [replace(row, model="") for row in inputs.jobs], inputs.cluster, CurveCache(), elastic=elastic
            )
        except ValueError as error:
            raise ValueError(strip_folder(str(error), folder)) from None
        return len(inputs.jobs)


def main(folder: Path) -> int:
    task = json.loads((folder / TASK_FILE).read_text())
    threading.Thread(target=_exit_with_parent, args=(folder,), daemon=True).start()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (task["memory_bytes"], resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (task["cpu_s"], task["cpu_s"] + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        write_json_atomically(folder / REPORT_FILE, _run_simulation(folder, task["policies"], task["seed"]))
    except (ValueError, PolicyError) as error:
        return _write_failure(folder, strip_folder(str(error), folder))
    except MemoryError:
        resource.setrlimit(
            resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )  # writing the failure needs memory
        return _write_failure(folder, f"it exceeds the memory limit of {task['memory_bytes']} bytes")
    return 0


def _run_simulation(folder: Path, policies: Sequence[str], seed: int) -> Any:
    """Return the output of `ebbtide simulate -o json`, and the series of charts as `series`."""
    inputs = read_input_files(folder)
    (report,) = simulate_seeds(
        inputs, policies, (seed,), progress=_make_progress_writer(folder, policies, len(inputs.jobs))
    )
    return to_plain_json(report.to_json() | {"series": [series.to_chart() for series in report.series]})


def _make_progress_writer(folder: Path, policies: Sequence[str], jobs: int) -> Callable[[int, int], None]:
    written_at_s = -PROGRESS_INTERVAL_S

    def write_progress(done: int, total: int) -> None:
        nonlocal written_at_s
        if time.monotonic() - written_at_s >= PROGRESS_INTERVAL_S:
            written_at_s = time.monotonic()
            playing = policies[min(done // jobs, len(policies) - 1)]
            write_json_atomically(folder / PROGRESS_FILE, {"playing": playing, "jobs_done": done})

    write_progress(0, 0)
    return write_progress


def _write_failure(folder: Path, reason: str) -> int:
    (folder / FAILURE_FILE).write_text(reason)
    return 1


def _exit_with_parent(folder: Path) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
