"""Dry runs of jobs whose pods a cluster has not checked yet."""

from __future__ import annotations

from typing import Any

import pytest

from api.explanations import dry_run_tick, list_unchecked
from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.decisions import ReasonCode
from scheduler.domain.job_state import JobState
from scheduler.scheduling.policy_sets import load_policy_set
from tests.builders import a_fleet, a_job, a_snapshot
from tests.unit.scheduling.test_node_fit import a_host, fleet, requesting

CLAIM: dict[str, Any] = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}


@pytest.mark.parametrize(("cpu", "spec"), [("4", {}), ("4", CLAIM), ("96", CLAIM)])
def test_job_is_judged_as_if_the_cluster_accepted_its_pods(cpu: str, spec: dict[str, Any]) -> None:
    snapshot, job = a_snapshot(fleet(a_host("t0"))), requesting("new", 2, spec=spec, cpu=cpu)
    dry_run = dry_run_tick(snapshot, load_policy_set("ebbtide"), Command("c", 0.0, SubmitJob("new", job.spec), "x"))
    if cpu == "4":
        assert dry_run.snapshot.jobs["new"].state is JobState.STARTING
    else:
        assert dry_run.report.waiting["new"].code is ReasonCode.NO_FEASIBLE_NODE
    assert len(list_unchecked(job.spec, snapshot)) == (2 if spec else 1)


def test_nothing_is_unchecked_for_plain_jobs_and_on_machines() -> None:
    assert not list_unchecked(a_job("plain", 1).spec, a_snapshot(fleet(a_host("t0"))))
    assert not list_unchecked(requesting("new", 1, spec=CLAIM).spec, a_snapshot(a_fleet(training=1, inference=0)))
