"""Figure 8a of ElasticFlow (ASPLOS'23), reproduced: share of deadlines met.

The folder in EBBTIDE_DATA must contain jobs/elasticflow_fig8a.csv.gz and profiles/elasticflow_throughputs.csv.gz (both
pkusys/ElasticFlow). ElasticFlow's simulator re-plans at most once a minute and charges 2 to 16 s of every running job
each time, 31 to 43 s every sixtieth time. Ours charges 30 s for each change of a job.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.throughput import read_throughput
from scheduler.documents.trace_files import read_jobs
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import SimulationOptions, simulate
from tests.benchmarks.reproduce import Row, traces

JOBS, PROFILE = "jobs/elasticflow_fig8a.csv.gz", "profiles/elasticflow_throughputs.csv.gz"
CLUSTER = {
    "pools": [{"name": "training", "kind": "training", "nodes": 16, "gpus_per_node": 4, "gpu": "t4"}],
    "elastic": {"from_gpus": 1, "min_ratio": 0.01, "max_ratio": 64.0},
    "reconfiguration_s": 30,
    "storage_bytes_per_s": None,
    "lending_period_s": 3600,
}
"""The ratios allow every measured count from 1 to 64 for every job, as in ElasticFlow's simulator."""


@dataclass(frozen=True, slots=True)
class Published:
    """Share of deadlines met by a policy, and the accepted range of ours."""

    policy: str
    met_ratio: float
    below: float
    above: float


FIGURE_8A = (Published("edf", 0.118, 0.02, 0.02), Published("elastic-deadline", 0.728, 0.0, 1.0))


def play(policy: str) -> PolicyReport:
    """Simulate all 195 jobs of the figure on 64 GPUs.

    Raises:
        FileNotFoundError: the trace or the profile is missing.
    """
    folder = traces(JOBS, PROFILE)
    options = SimulationOptions(profiles=(read_throughput(folder / PROFILE),))
    cluster = parse_document(ClusterDocument, CLUSTER)
    return simulate(read_jobs(folder / JOBS), (), cluster, policy, seed=0, options=options).policies[0]


def measure_met_ratio(report: PolicyReport) -> float:
    assert report.deadlines_met_ratio is not None, "every job of the trace has a deadline"
    return report.deadlines_met_ratio


def rows() -> list[Row]:
    """Return (name, target, measured) of each bar of the figure."""
    return [_row(published, play(published.policy)) for published in FIGURE_8A]


def _row(published: Published, ours: PolicyReport) -> Row:
    within = f"within {published.below * 100:.0f} points" if published.below else "or more"
    bar = f"{published.met_ratio:.1%} of deadlines met, {within}"
    met = round(measure_met_ratio(ours) * ours.jobs)
    measured = (
        f"{measure_met_ratio(ours):.1%} ({met} of {ours.jobs}), {ours.preemptions} preemptions, {ours.resizes} resizes"
    )
    return f"ElasticFlow figure 8a, 16 x 4 GPUs, {published.policy}: {ours.wall_s:.0f} s to play", bar, measured
