"""Reasons why volumes or network of a pod are not ready, read from Events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.kubernetes.client import connect
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.pod_view import PodView
from scheduler.kubernetes.setup_errors import FIRST_READ_S, READS_MAX, REREAD_S, SetupErrors, find_setup_error
from tests.unit.kubernetes.scripted_server import Answer, ScriptedServer
from tests.unit.kubernetes.test_flow_control import QUICK, kubeconfig

LOST = 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'


def an_event(note: str, at: str, reason: str = "FailedMount", **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": at}, "reason": reason, "note": note, "deprecatedLastTimestamp": at, **fields}


def a_waiting_pod(number: int, **changes: Any) -> PodView:
    pod = PodView("jobs", f"a-{number}", f"uid-{number}", "t0", 1, "Pending", False, job_id="a", is_prepared=False)
    return replace(pod, **changes)


def test_newest_event_with_a_cause_is_chosen() -> None:
    summary = an_event("Unable to attach or mount volumes: unmounted volumes=[keys]", "2026-11-27T00:09:00Z")
    older, newer = an_event("other", "2026-11-27T00:01:00Z"), an_event(LOST, "2026-11-27T00:02:00Z")
    attach = an_event("Multi-Attach error", "", "FailedAttachVolume", series={"lastObservedTime": "2026-11-27T00:03Z"})
    usual = an_event("pulling image", "2026-11-27T00:08:00Z", "Pulling")
    assert find_setup_error([summary, older, newer, usual]) == f"FailedMount: {LOST}"
    assert find_setup_error([newer, attach]) == "FailedAttachVolume: Multi-Attach error"
    assert find_setup_error([summary]).startswith("FailedMount: Unable")
    assert find_setup_error([usual]) == ""


def test_one_pod_of_a_job_is_read_at_a_time_and_forgotten_once_it_is_ready(tmp_path: Path) -> None:
    now_s = [0.0]
    found = Answer(200, {"items": [an_event(LOST, "2026-11-27T00:02:00Z")], "metadata": {"resourceVersion": "1"}})
    with ScriptedServer(found, found).running() as server:
        cluster = connect(kubeconfig(tmp_path, server.url), limits=QUICK)
        errors = SetupErrors(cluster, lambda: now_s[0])
        pods = (a_waiting_pod(1), a_waiting_pod(2), a_waiting_pod(3, is_prepared=True), a_waiting_pod(4, node=""))
        view = ClusterView(pods=pods)
        assert not list(errors.plan_reads(view))
        for at_s, known in ((FIRST_READ_S, {"uid-1"}), (FIRST_READ_S + REREAD_S, {"uid-1", "uid-2"})):
            now_s[0] = at_s
            (read,) = errors.plan_reads(view)
            read.run()
            assert not list(errors.plan_reads(view))
            assert errors.list_errors().keys() == known
        assert errors.list_errors()["uid-1"] == f"FailedMount: {LOST}"
        assert not list(errors.plan_reads(ClusterView(pods=(a_waiting_pod(1, is_prepared=True),))))
        assert not errors.list_errors()


def test_many_waiting_jobs_are_read_in_turn(tmp_path: Path) -> None:
    now_s = [0.0]
    nothing = Answer(200, {"items": [], "metadata": {"resourceVersion": "1"}})
    with ScriptedServer(*[nothing] * (2 * READS_MAX)).running() as server:
        errors = SetupErrors(connect(kubeconfig(tmp_path, server.url), limits=QUICK), lambda: now_s[0])
        numbers = range(10, 10 + 3 * READS_MAX)
        view = ClusterView(pods=tuple(a_waiting_pod(number, job_id=f"job-{number}") for number in numbers))
        assert not list(errors.plan_reads(view))
        texts = []
        for at_s in (FIRST_READ_S, FIRST_READ_S + 1.0):
            now_s[0] = at_s
            reads = list(errors.plan_reads(view))
            assert len(reads) == READS_MAX
            for read in reads:
                read.run()
                texts.append(read.description)
        assert len(set(texts)) == 2 * READS_MAX
