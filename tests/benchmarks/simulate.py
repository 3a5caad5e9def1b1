"""`ebbtide simulate` on recorded traces: its speed, and the queueing times of strict FIFO.

The traces are not part of the repository. The environment variable EBBTIDE_DATA names the folder with
jobs/itp_cluster08.csv.gz (microsoft/elasticflow-traces) and demand/servegen_m_small.csv.gz (alibaba/ServeGen).
"""

from __future__ import annotations

import os
from pathlib import Path

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import read_demand, read_jobs
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import simulate

JOBS = "jobs/itp_cluster08.csv.gz"
DEMAND = "demand/servegen_m_small.csv.gz"
FIRST_JOBS = 2000
WALL_S_MAX = 30.0
STRICT_FIFO_WAIT_S = 3600.0
POOL = {"nodes": 14, "gpus_per_node": 8, "gpu": "a100-80g"}
CLUSTER = {
    "pools": [
        {"name": "training", "kind": "training", **POOL},
        {"name": "inference", "kind": "inference", **POOL, "peak_gpus": 106, "lending": {"quantile": 0.999}},
    ],
    "elastic": {"from_gpus": 2, "min_ratio": 0.5, "max_ratio": 2.0},
}

Row = tuple[str, str, str]


def rows() -> list[Row]:
    """Return (name, target, measured) of each benchmark, or one row with the reason if there are no traces."""
    folder = Path(os.environ.get("EBBTIDE_DATA", ""))
    if not os.environ.get("EBBTIDE_DATA"):
        return [("simulate", "-", "skipped: EBBTIDE_DATA does not name the folder of the traces")]
    missing = [name for name in (JOBS, DEMAND) if not (folder / name).is_file()]
    if missing:
        return [("simulate", "-", f"skipped: the folder of EBBTIDE_DATA has no {' and no '.join(missing)}")]
    jobs, demand = read_jobs(folder / JOBS), read_demand(folder / DEMAND)
    cluster = parse_document(ClusterDocument, CLUSTER)
    (fifo,) = simulate(jobs[:FIRST_JOBS], demand, cluster, "fifo", seed=0).policies
    (ebbtide,) = simulate(jobs[:FIRST_JOBS], demand, cluster, "ebbtide", seed=0).policies
    (strict,) = simulate(jobs, demand, cluster, "fifo", seed=0).policies
    return [_speed(fifo), _speed(ebbtide), _gain(fifo, ebbtide), _strict(strict)]


def _speed(report: PolicyReport) -> Row:
    name = f"simulate {report.policy}, first {report.jobs:,} jobs on 14 + 14 nodes"
    p50_ms, p99_ms = report.tick_s.p50 * 1000, report.tick_s.p99 * 1000
    measured = f"{report.wall_s:.1f} s ({report.ticks:,} ticks, p50 {p50_ms:.2f} ms, p99 {p99_ms:.1f} ms)"
    return name, f"under {WALL_S_MAX:.0f} s", measured


def _gain(fifo: PolicyReport, ebbtide: PolicyReport) -> Row:
    waits = f"queueing {fifo.queueing_s.mean:,.0f} -> {ebbtide.queueing_s.mean:,.0f} s"
    completion = f"JCT {fifo.jct_s.mean:,.0f} -> {ebbtide.jct_s.mean:,.0f} s"
    short = ebbtide.inference_short_intervals_ratio.first_pass
    late = f"{ebbtide.recalls_late} of {ebbtide.recalls} recalls late, inference short in {short:.2%} of intervals"
    return "ebbtide against fifo, the same jobs", "-", f"{waits}, {completion}; {late}"


def _strict(report: PolicyReport) -> Row:
    off = report.queueing_s.mean / STRICT_FIFO_WAIT_S - 1.0
    measured = f"{report.queueing_s.mean:,.0f} s ({off:+.2%}), {report.wall_s:.0f} s to play"
    return f"strict FIFO, all {report.jobs:,} jobs at 112 GPUs: mean waiting", "3,600 s within 3%", measured
