"""ElasticFlow's figure 8a in the simulator, and a small trace with deadlines worked out by hand."""

from __future__ import annotations

import pytest

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import JobRow
from scheduler.simulator.simulate import simulate
from tests.benchmarks.reproduce import traces
from tests.benchmarks.reproduce_deadlines import FIGURE_8A, JOBS, PROFILE, Published, measure_met_ratio, play

FOUR_GPUS = parse_document(
    ClusterDocument,
    {
        "pools": [{"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": 4, "gpu": "a100-80g"}],
        "elastic": {"from_gpus": 1, "min_ratio": 0.1, "max_ratio": 4.0},
        "reconfiguration_s": 0,
        "storage_bytes_per_s": None,
    },
)
INFEASIBLE = (JobRow(2, "a", 0.0, 400.0, 1, deadline_s=99.0), JobRow(3, "b", 0.0, 400.0, 1, deadline_s=110.0))
"""Two jobs of 400 GPU-seconds. EDF gives `a` all four GPUs until 100 s, so both are late. ElasticFlow does not admit
`a`, whose deadline cannot be met, and `b` ends at 100 s."""


@pytest.mark.parametrize(("policy", "met"), [("edf", 0.0), ("elastic-deadline", 0.5)])
def test_infeasible_deadline_delays_other_jobs_under_edf_only(policy: str, met: float) -> None:
    report = simulate(INFEASIBLE, (), FOUR_GPUS, policy, seed=0).policies[0]
    assert report.completed == 2
    assert measure_met_ratio(report) == pytest.approx(met)


@pytest.mark.parametrize("published", FIGURE_8A, ids=lambda published: published.policy)
def test_met_deadlines_match_the_paper(published: Published) -> None:
    try:
        traces(JOBS, PROFILE)
    except FileNotFoundError as missing:
        pytest.skip(f"{missing} is missing")
    report = play(published.policy)
    print(f"\n{published.policy}: {measure_met_ratio(report):.1%} of deadlines met in {report.wall_s:.0f} s")
    assert report.completed == report.jobs == 195
    assert published.met_ratio - published.below <= measure_met_ratio(report) <= published.met_ratio + published.above
