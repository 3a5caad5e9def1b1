"""Problems over the API: who sees which, figures equal those of other routes, and they are found once per state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.problems import LISTED_PER_CODE_MAX, ProblemCache
from scheduler.domain.events import Event, EventCode, JobStep
from scheduler.domain.fleet import NodeState
from scheduler.domain.job_queue import UsageEntry, UsageKey
from scheduler.domain.job_state import JobState
from scheduler.domain.problems import Problem
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.problem_recorder import EVENTS_MAX, ProblemRecorder, RecentEvents
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import NOW_S, ApiService
from tests.unit.scheduling.problems.planted import failed_job, planted_snapshot

CHART = Path(__file__).resolve().parents[2] / "helm" / "ebbtide"
Change = Callable[[Snapshot], Snapshot]


def commit(service: ApiService, change: Change, **more: Any) -> None:
    """Commit a change of the state as a tick does."""
    before = service.store.load().snapshot
    after = replace(change(before), generation=before.generation + 1)
    assert service.leader is not None
    service.store.commit(Commit(before, after, service.leader.epoch, **more))


@pytest.fixture
def planted() -> ApiService:
    """A service with one problem of each code that follows from the snapshot. It finds them again each time."""
    service = ApiService(store=MemoryStore(planted_snapshot()))
    service.leader = service.store.acquire_lease("test", now_s=NOW_S, ttl_s=1e6)
    service.app.state.problems = ProblemCache(clock_s=lambda: 0.0)
    return service


def found(service: ApiService) -> dict[str, dict[str, Any]]:
    """Return the problems by code."""
    return {each["code"]: each for each in service.get("/v1/problems")["items"]}


def test_healthy_service_has_no_problems(fleet: ApiService) -> None:
    fleet.made("/v1/pools/inference/demand", {"gpus": 1})
    fleet.tick()
    assert fleet.get("/v1/problems") == {
        "generation": 1,
        "as_of_s": fleet.clock.now_s(),
        "counts": {},
        "severities": {"critical": 0, "warning": 0, "notice": 0},
        "items": [],
        "resolved": [],
    }


def test_figures_equal_those_of_the_api(planted: ApiService) -> None:
    usage = UsageEntry(UsageKey(int(NOW_S // 3600 * 3600), "default", "ann", "a100-80g", False), 90_000.0, 30_000.0)
    commit(planted, lambda state: state, usage=(usage,))
    problems = found(planted)
    account = planted.get("/v1/jobs/loser")["account"]
    numbers = problems["JobLosesWork"]["numbers"]
    assert {name: numbers[name] for name in ("gpu_s", "lost_gpu_s", "resizes", "preemptions")} == {
        name: account[name] for name in ("gpu_s", "lost_gpu_s", "resizes", "preemptions")
    }
    overview = planted.get("/v1/overview")
    pools = {pool["name"]: pool for pool in overview["pools"]}
    nodes = {node["name"]: node for node in overview["nodes"]}
    queues = {queue["name"]: queue for queue in overview["queues"]}
    short, lent = problems["InferenceShort"]["numbers"], [n for n in nodes.values() if n["state"] == "recalled"]
    assert short["asked_gpus"] == pools["lending"]["demand"]["asked_gpus"]
    assert short["lent_gpus"] == sum(node["gpus"] for node in lent)
    assert short["supply_gpus"] == pools["lending"]["capacity_gpus"] - short["lent_gpus"]
    assert problems["DemandStale"]["numbers"]["gpus"] == pools["stale"]["demand"]["gpus"]
    assert problems["NodeDown"]["numbers"]["gpus"] == nodes["t-down"]["gpus"]
    assert problems["RecallLate"]["numbers"]["held_gpus"] == nodes["i-late"]["held"]
    assert problems["QueueStuck"]["numbers"]["pending_jobs"] == queues["stuck"]["waiting_jobs"]
    promised, unserved = queues["promised"], problems["GuaranteeUnserved"]["numbers"]
    assert (unserved["used_gpus"], unserved["guaranteed_gpus"]) == (promised["used_gpus"], promised["guaranteed_gpus"])
    goodput = problems["GoodputLow"]
    total = planted.get("/v1/usage", **{"from": goodput["since_s"]})["total"]
    assert {name: goodput["numbers"][name] for name in ("gpu_s", "lost_gpu_s")} == pytest.approx(
        {name: total[name] for name in ("gpu_s", "lost_gpu_s")}
    )


def test_node_tells_since_when_it_is_down(fleet: ApiService) -> None:
    fleet.made("/v1/pools/inference/demand", {"gpus": 1})
    fleet.tick()
    fleet.app.state.problems = ProblemCache(clock_s=lambda: 0.0)
    event = Event(NOW_S + 5, EventCode.NODE_CHANGED, "t0", "node t0 is down", cause=NodeState.DOWN.value)
    earlier = replace(event, at_s=NOW_S - 50)
    up = Event(NOW_S - 40, EventCode.NODE_CHANGED, "t0", "node t0 is up", cause=NodeState.UP.value)
    commit(fleet, _take_t0_down, events=(earlier, up, event))
    assert found(fleet)["NodeDown"]["since_s"] == NOW_S + 5


def _take_t0_down(state: Snapshot) -> Snapshot:
    return replace(state, nodes={**state.nodes, "t0": replace(state.nodes["t0"], state=NodeState.DOWN)})


def test_missing_leader_and_old_demand_appear_without_a_tick(fleet: ApiService) -> None:
    fleet.made("/v1/pools/inference/demand", {"gpus": 1})
    fleet.tick()
    assert found(fleet) == {}
    fleet.app.state.problems = ProblemCache(clock_s=lambda: 0.0)
    fleet.clock.move_to(fleet.clock.now_s() + 4000.0)
    assert {code: each["severity"] for code, each in found(fleet).items()} == {
        "ControllerMissing": "critical",
        "DemandLost": "critical",
    }


def test_callers_see_problems_of_their_queues_and_of_the_fleet() -> None:
    snapshot = planted_snapshot()
    guarded = AuthenticatedService(MemoryStore(snapshot))
    guarded.leader = guarded.store.acquire_lease("test", now_s=NOW_S, ttl_s=1e6)
    usage = UsageEntry(UsageKey(int(NOW_S // 3600 * 3600), "default", "ann", "a100-80g", False), 90_000.0, 30_000.0)
    ended = (failed_job(), failed_job(job_id="own", queue="promised"))
    commit(guarded, lambda state: state, ended_jobs=ended, usage=(usage,))
    with guarded.http:
        everything = guarded.request("GET", "/v1/problems", guarded.root).json()
        own = guarded.request("GET", "/v1/problems", guarded.token("r", "viewer:promised")).json()
    kinds = {(each["code"], each["kind"], each["subject"]) for each in own["items"]}
    assert ("JobFailed", "job", "own") in kinds
    assert ("GuaranteeUnserved", "queue", "promised") in kinds
    assert {("NodeDown", "node", "t-down"), ("RecallLate", "node", "i-late")} <= kinds
    hidden = {"GoodputLow", "QueueStuck", "JobOutOfMemory", "JobLosesWork"}
    assert not hidden & own["counts"].keys()
    assert hidden <= everything["counts"].keys()
    assert (own["counts"]["JobFailed"], everything["counts"]["JobFailed"]) == (1, 2)
    text = repr(own)
    assert not any(name in text for name in ("greedy", "loser", "stuck", "slowed"))


def test_resolved_problems_are_recorded_and_listed(planted: ApiService) -> None:
    recorder = record_problems(planted)
    assert {each.code.value for each in planted.store.problems.list_open()} == found(planted).keys()
    commit(planted, lambda state: Snapshot(generation=state.generation, now_s=state.now_s))
    planted.clock.move_to(planted.clock.now_s() + 60.0)
    recorder.step()
    now_s = planted.clock.now_s()
    view = planted.get("/v1/problems", resolved_since_s=now_s)
    resolved = {each["code"]: each for each in view["resolved"]}
    assert {"NodeDown", "RecallLate", "QueueStuck", "JobLosesWork"} <= resolved.keys()
    for each in resolved.values():
        assert (each["end_s"], each["settled"], each["times"]) == (now_s, False, 1)
        assert each["duration_s"] == each["end_s"] - each["begin_s"] >= 0
        assert each["ending"]
    assert (resolved["NodeDown"]["pool"], resolved["QueueStuck"]["pool"]) == ("training", "")
    assert planted.get("/v1/problems", resolved_since_s=now_s + 1.0)["resolved"] == []
    assert planted.get("/v1/problems")["resolved"] == []


def test_callers_see_resolved_problems_of_their_queues_and_of_the_fleet() -> None:
    guarded = AuthenticatedService(MemoryStore(planted_snapshot()))
    guarded.leader = guarded.store.acquire_lease("test", now_s=NOW_S, ttl_s=1e6)
    recorder = record_problems(guarded)
    commit(guarded, lambda state: replace(state, jobs={}, nodes={}, loans={}))
    recorder.step()
    with guarded.http:
        path = f"/v1/problems?resolved_since_s={NOW_S}"
        everything = guarded.request("GET", path, guarded.root).json()["resolved"]
        own = guarded.request("GET", path, guarded.token("r", "viewer:promised")).json()["resolved"]
    codes = {each["code"] for each in own}
    assert {"NodeDown", "GuaranteeUnserved"} <= codes
    assert not {"QueueStuck", "JobLosesWork"} & codes
    assert {"QueueStuck", "JobLosesWork"} <= {each["code"] for each in everything}
    assert not any(name in repr(own) for name in ("greedy", "loser", "stuck"))


def record_problems(service: ApiService) -> ProblemRecorder:
    """Let a leader record the problems of now."""
    assert service.leader is not None
    epoch = service.leader.epoch
    recorder = ProblemRecorder(
        service.store, clock=service.clock, epoch=lambda: epoch, policies=load_policy_set("ebbtide")
    )
    recorder.step()
    return recorder


def test_many_alike_problems_are_counted_and_listed_in_part(planted: ApiService) -> None:
    ended = tuple(failed_job(job_id=f"failed-{at}") for at in range(LISTED_PER_CODE_MAX + 20))
    commit(planted, lambda state: state, ended_jobs=ended)
    view = planted.get("/v1/problems")
    assert view["counts"]["JobFailed"] == len(ended)
    assert sum(each["code"] == "JobFailed" for each in view["items"]) == LISTED_PER_CODE_MAX


def test_problems_are_found_once_per_state(planted: ApiService, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count_call(snapshot: Snapshot, evidence: Evidence) -> tuple[Problem, ...]:
        calls.append(snapshot.generation)
        return ()

    monkeypatch.setattr("api.problems.find_problems", count_call)
    for _ in range(5):
        planted.get("/v1/problems")
    assert len(calls) == 1
    commit(planted, lambda state: state)
    planted.get("/v1/problems")
    planted.get("/v1/problems")
    assert len(calls) == 2


def test_events_are_read_once_and_restarts_counted() -> None:
    store = MemoryStore()
    lease = store.acquire_lease("test", now_s=NOW_S, ttl_s=1e6)
    assert lease is not None
    events = [
        Event(NOW_S + at, EventCode.JOB_STATE, "a", "", cause=state.value, job=JobStep(state))
        for at, state in enumerate([JobState.STARTING, JobState.RUNNING, JobState.QUEUED] * 4)
    ]
    events.append(Event(NOW_S + 20, EventCode.JOB_PREEMPTED, "a", "", job=JobStep(JobState.PREEMPTED)))
    reader = RecentEvents()
    for begin in range(0, len(events), 5):
        before = store.load().snapshot
        after = replace(before, generation=before.generation + 1)
        store.commit(Commit(before, after, lease.epoch, events=tuple(events[begin : begin + 5])))
        log = reader.read(store)
    activity = log.count(NOW_S + 30)["a"]
    assert (activity.restarts, activity.preemptions, activity.first_at_s) == (4, 1, NOW_S + 2)
    assert log.count(NOW_S + 20 + 3600) == {}
    assert len(events) < EVENTS_MAX


def test_alert_rules_are_those_of_the_chart(service: ApiService) -> None:
    rules = service.get("/v1/alert-rules")["items"]
    chart = yaml.safe_load((CHART / "rules.yaml").read_text(encoding="utf-8"))
    names = {rule["alert"] for group in chart["groups"] for rule in group["rules"] if "alert" in rule}
    assert {rule["name"] for rule in rules} == names
    assert [rule["severity"] for rule in rules] == sorted(rule["severity"] for rule in rules)
    assert not any("{{" in rule["summary"] for rule in rules)
