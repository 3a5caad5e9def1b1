"""Rubick's workloads on 8 nodes of 8 A800, with its measured placements as ground truth, against Rubick's simulator.

The files are not part of the repository. The environment variable EBBTIDE_DATA names the folder with
jobs/rubick_workload_base.csv and _bp.csv and measured/rubick_a800_placements.csv, all from
AlibabaPAI/reconfigurable-dl-scheduler. For times between measured placements, see
`scheduler.simulator.throughput_curves.PlacedCurves`.

Rubick's simulator also charges 260 s for the first placement of a job, and lets a job that lost its GPUs keep running
in its old placement (`reallocate` compares a result with itself). Here no job runs without GPUs. The run times of the
trace include the start, so a first start is free, as in all our simulations; the last row charges it as well.
"""

from __future__ import annotations

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
RUBICK_JCT_S, RUBICK_MAKESPAN_S = 3_638.3, 58_680.0
JCT_S_MAX, WALL_S_MAX = 3_270.0, 10.0
CLUSTER = {
    "pools": [{"name": "training", "kind": "training", "nodes": 8, "gpus_per_node": 8, "gpu": "a800-80g"}],
    "elastic": {"from_gpus": 1, "min_ratio": 0.01, "max_ratio": 64},  # any count that was measured
    "reconfiguration_s": 260,
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
    """Return (name, target, measured) of each workload and policy."""
    bar = f"JCT {JCT_S_MAX:,.0f} s, makespan {RUBICK_MAKESPAN_S:,.0f} s, {WALL_S_MAX:.0f} s"
    rubick = ("Rubick's workload base, its own simulator", "-", _told(RUBICK_JCT_S, RUBICK_MAKESPAN_S))
    played = [
        (f"Rubick's workload {workload}, {policy}", bar if policy == "ebbtide" else "-", _of(workload, policy))
        for workload in WORKLOADS
        for policy in ("fifo", "ebbtide")
    ]
    charged = ("the same, ebbtide, first starts at 260 s too", "-", _of("base", "ebbtide", start_s=260))
    return [rubick, *played, charged]


def _of(workload: str, policy: str, **more: Any) -> str:
    report = simulate_rubick(workload, policy, **more)
    return f"{_told(report.jct_s.mean, report.makespan_s)}, {report.wall_s:.1f} s to play"


def _told(jct_s: float, makespan_s: float) -> str:
    return f"JCT {jct_s:,.0f} s, makespan {makespan_s:,.0f} s"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
