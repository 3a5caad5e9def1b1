"""Rubick's workloads on 8 nodes of 8 A800, with its measured placements as ground truth, against Rubick's simulator.

The files are not part of the repository. The environment variable EBBTIDE_DATA names the folder with
jobs/rubick_workload_base.csv and _bp.csv and measured/rubick_a800_placements.csv, all from
AlibabaPAI/reconfigurable-dl-scheduler. For times between measured placements, see
`scheduler.simulator.throughput_curves.PlacedCurves`.

Rubick's simulator lets a job that lost its GPUs keep running in its old placement (`reallocate` compares a result with
itself). Here no job runs without GPUs. It charges 260 s for each new placement, the first one of a job included. So
base is compared in two pairs: with first starts that cost 260 s in both simulators, and with free ones in both. The
second figures of Rubick's simulator are those that it gives with the charge of first starts removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.throughput import read_throughput
from scheduler.documents.trace_files import read_jobs
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import SimulationOptions, simulate
from tests.benchmarks.reproduce import traces

Row = tuple[str, str, str]

PLACEMENTS = "measured/rubick_a800_placements.csv"
WORKLOADS = {name: f"jobs/rubick_workload_{name}.csv" for name in ("base", "bp")}
RECONFIGURATION_S = 260.0
POLICIES = ("fifo", "ebbtide")


@dataclass(frozen=True, slots=True)
class Pair:
    """Figures of Rubick's simulator on base, mean JCT and makespan, with first starts that take `start_s`."""

    name: str
    start_s: float
    jct_s: float
    makespan_s: float


PAIRS = (
    Pair("first starts take 260 s", RECONFIGURATION_S, 3_638.3, 58_680.0),
    Pair("first starts are free", 0.0, 1_797.0, 54_540.0),
)
CLUSTER = {
    "pools": [{"name": "training", "kind": "training", "nodes": 8, "gpus_per_node": 8, "gpu": "a800-80g"}],
    "elastic": {"from_gpus": 1, "min_ratio": 0.01, "max_ratio": 64},  # any count that was measured
    "reconfiguration_s": RECONFIGURATION_S,
    "storage_bytes_per_s": None,
}


def simulate_rubick(workload: str, policy: str, **more: Any) -> PolicyReport:
    """Simulate one workload under one policy set. `more` extends the cluster document.

    Raises:
        FileNotFoundError: the files are missing.
    """
    folder = traces(PLACEMENTS, WORKLOADS[workload])
    jobs, options = (
        read_jobs(folder / WORKLOADS[workload]),
        SimulationOptions(profiles=(read_throughput(folder / PLACEMENTS),)),
    )
    cluster = parse_document(ClusterDocument, {**CLUSTER, **more})
    return simulate(jobs, (), cluster, policy, seed=0, options=options).policies[0]


def rows() -> list[Row]:
    """Return (name, target, measured) of each workload and policy. The target is Rubick's figure in the same pair."""
    found: list[Row] = []
    for pair in PAIRS:
        bar = f"Rubick: {_told(pair.jct_s, pair.makespan_s)}"
        for policy in POLICIES:
            measured = _of("base", policy, start_s=pair.start_s)
            found.append((f"Rubick's workload base, {pair.name}, {policy}", bar, measured))
    played = [(f"Rubick's workload bp, free first starts, {policy}", "-", _of("bp", policy)) for policy in POLICIES]
    return [*found, *played]


def _of(workload: str, policy: str, **more: Any) -> str:
    report = simulate_rubick(workload, policy, **more)
    return f"{_told(report.jct_s.mean, report.makespan_s)}, {report.wall_s:.1f} s to play"


def _told(jct_s: float, makespan_s: float) -> str:
    return f"JCT {jct_s:,.0f} s, makespan {makespan_s:,.0f} s"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
