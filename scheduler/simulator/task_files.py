"""The files of a simulation that was handed in: written where `ebbtide simulate`'s readers find them, and checked."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scheduler.domain.simulation_task import SimulationFiles
from scheduler.simulator.curves import CurveBook
from scheduler.simulator.simulate import Inputs, load_inputs, policy_sets
from scheduler.simulator.traces import demand_traces
from scheduler.simulator.workloads import submissions

JOBS, DEMAND, CLUSTER = "jobs.csv", "demand.csv", "cluster.yaml"


def write_files(files: SimulationFiles, folder: Path) -> None:
    texts = {JOBS: files.jobs, DEMAND: files.demand, CLUSTER: files.cluster}
    for name, text in texts.items():
        if text or name != DEMAND:
            # Newlines as they were handed in, and whatever a JSON string may hold that UTF-8 has no form for.
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def read_files(folder: Path) -> Inputs:
    """Raises ValueError, as `load_inputs`; files are named as they are called in the folder."""
    demand = folder / DEMAND
    try:
        return load_inputs(folder / JOBS, demand if demand.exists() else None, folder / CLUSTER)
    except ValueError as wrong:
        raise ValueError(without_folder(str(wrong), folder)) from None


def without_folder(said: str, folder: Path) -> str:
    return said.replace(f"{folder}/", "")


def check_files(files: SimulationFiles, policies: Sequence[str]) -> int:
    """How many jobs the trace has, once all has been checked that needs no plan to be solved.

    Raises:
        ValueError: something is wrong; the message names file, line, field, value and what is allowed.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-simulation-") as name:
        folder = Path(name)
        write_files(files, folder)
        inputs = read_files(folder)
        try:
            elastic = all(one.scales for one in policy_sets(policies, inputs.cluster))
            demand_traces(inputs.demand, inputs.cluster)
            submissions([replace(row, model="") for row in inputs.jobs], inputs.cluster, CurveBook(), elastic=elastic)
        except ValueError as wrong:
            raise ValueError(without_folder(str(wrong), folder)) from None
        return len(inputs.jobs)
