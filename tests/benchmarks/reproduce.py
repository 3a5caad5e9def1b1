"""Published simulations, reproduced: the published values and ours.

The traces are not part of the repository. The environment variable EBBTIDE_DATA names the folder with
jobs/muri_trace3.csv.gz (Rivendile/Muri, from Philly).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import read_jobs
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import simulate

Row = tuple[str, str, str]

MURI_JOBS = "jobs/muri_trace3.csv.gz"
MURI_STRETCH = 1.016
"""Muri's simulator makes iterations 1.5% longer than measured and reduces the progress of every running job a little at
each event, so its jobs run longer than in the trace."""
MURI_CLUSTER = {
    "pools": [{"name": "training", "kind": "training", "nodes": 8, "gpus_per_node": 8, "gpu": "v100-32g"}],
    "reconfiguration_s": 0,
    "storage_bytes_per_s": None,
    "lending_period_s": 86_400,
}


@dataclass(frozen=True, slots=True)
class Published:
    """Mean JCT and queueing time of a policy on the Muri trace, and the accepted deviation."""

    policy: str
    jct_s: float
    waiting_s: float
    tolerance: float


MURI = (
    Published("srtf", 193_082.0, 145_368.0, 0.03),
    Published("srsf", 185_022.0, 137_307.0, 0.03),
    Published("las", 347_213.0, 299_395.0, 0.05),
)


def traces(*names: str) -> Path:
    """Return the folder of the traces.

    Raises:
        FileNotFoundError: EBBTIDE_DATA is not set, or the folder lacks one of `names`.
    """
    folder = os.environ.get("EBBTIDE_DATA")
    if not folder:
        raise FileNotFoundError("EBBTIDE_DATA, which names the folder of the traces,")
    for name in names:
        if not (Path(folder) / name).is_file():
            raise FileNotFoundError(f"{name} in the folder of EBBTIDE_DATA")
    return Path(folder)


def simulate_muri(policy: str) -> PolicyReport:
    """Simulate the whole Muri trace 3 on 8 nodes of 8 GPUs, without elastic jobs and with free preemption.

    Raises:
        FileNotFoundError: the trace is missing.
    """
    jobs = read_jobs(traces(MURI_JOBS) / MURI_JOBS)
    stretched = [replace(job, duration_s=job.duration_s * MURI_STRETCH) for job in jobs]
    return simulate(stretched, (), parse_document(ClusterDocument, MURI_CLUSTER), policy, seed=0).policies[0]


def rows() -> list[Row]:
    """Return (name, target, measured) of each published row."""
    return [_row(published, simulate_muri(published.policy)) for published in MURI]


def _row(published: Published, ours: PolicyReport) -> Row:
    jct, waiting = ours.jct_s.mean / published.jct_s - 1.0, ours.queueing_s.mean / published.waiting_s - 1.0
    bar = f"JCT {published.jct_s:,.0f} s, waiting {published.waiting_s:,.0f} s within {published.tolerance:.0%}"
    measured = f"{ours.jct_s.mean:,.0f} s ({jct:+.1%}), {ours.queueing_s.mean:,.0f} s ({waiting:+.1%})"
    return f"Muri trace 3, 8 x 8 GPUs, {published.policy}: {ours.wall_s:.0f} s to play", bar, measured


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
