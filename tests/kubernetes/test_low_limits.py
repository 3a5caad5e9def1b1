"""An operator that may send few requests starts jobs and writes their status over many rounds."""

from __future__ import annotations

from tests.kubernetes.crowd import phases, submit_all, wait_for_all
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

JOBS = 16


def test_low_limits_delay_jobs_but_leave_none_behind(operated: Operated) -> None:
    operated.settings = {"EBBTIDE_KUBERNETES_QPS": "30", "EBBTIDE_KUBERNETES_BURST": "20"}
    operated.add_nodes(JOBS)
    operated.agents.steps = 40
    submit_all(operated, JOBS, seed=1)
    operated.start_operator()
    eventually(lambda: "Running" in phases(operated), what="a job runs")
    wait_for_all(operated, JOBS)
