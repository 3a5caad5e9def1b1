"""Dry runs of jobs whose pods a cluster has not checked yet."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from api.explanations import DryRun, PendingReasonCache, dry_run_tick, list_unchecked
from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.decisions import ReasonCode
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.background import run_in_background
from scheduler.scheduling.policy_sets import PolicySet, load_policy_set
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


def test_requests_do_not_wait_for_long_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker computes. A request gets older reasons with their state meanwhile, and the newest ones afterwards."""
    first, second = (replace(a_snapshot(a_fleet(training=1, inference=0)), generation=at) for at in (1, 2))
    may_end, threads = threading.Event(), list[str]()
    may_end.set()

    def run_long(snapshot: Snapshot, policies: PolicySet) -> DryRun:
        threads.append(threading.current_thread().name)
        assert may_end.wait(30.0)
        return dry_run_tick(snapshot, policies)

    monkeypatch.setattr("api.explanations.dry_run_tick", run_long)
    reasons, stop = PendingReasonCache(load_policy_set("fifo"), clock_s=lambda: 0.0), threading.Event()
    with run_in_background(partial(reasons.run, lambda: first), stop, name="reasons"):
        assert reasons.read(first).snapshot is first
        may_end.clear()
        assert reasons.read(second).snapshot is first
        may_end.set()
        while reasons.read(second).snapshot is not second:
            assert len(threads) < 3
    assert set(threads) - {"MainThread"} == {"reasons"}
    assert threads[1:] == ["reasons"]
