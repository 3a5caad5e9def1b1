"""Agents in pods report over HTTP and get their orders in the reply."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from api.agent_assignments import checkpoint_notice
from api.agent_state import CACHE_TTL_S, HEARTBEAT_INTERVAL_S
from scheduler.domain.checkpoints import CheckpointRequest
from scheduler.domain.observation import AgentReport, BegunRun, KillOrder, RankPhase, RankReport, Run, RunPhase
from scheduler.domain.run_document import MasterAddress, RunDocument
from scheduler.domain.worker_token import issue_agent_token, issue_worker_token, verify_worker_token
from scheduler.executors.reported_runs import build_begun_run

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem

SECRET = b"a secret that only tests know...."
MASTER = MasterAddress("10.1.0.2", 29500)


class Agent:
    """The agent `p1` of a running job on node t0, with the run log behind the API."""

    def __init__(self, service: ApiService) -> None:
        self.service = service
        self.job_id = service.submit(command=["python", "train.py"], env={"SEED": "7"})
        service.tick()
        service.tick()
        self.token = issue_agent_token(SECRET, self.job_id)
        self.log = service.run_log

    def post(self, *runs: dict[str, Any], after_s: float = CACHE_TTL_S, node: str = "t0", **more: Any) -> Any:
        """Post a report `after_s` later and return the response."""
        self.service.clock.move_to(self.service.clock.now_s() + after_s)
        named = [{"job_id": self.job_id, "node": node, **run} for run in runs]
        report = {"pod": "p1", "address": "10.1.0.2", "runs": named, **more}
        return self.service.post(f"/v1/jobs/{self.job_id}/agents/{node}", report, token=self.token)

    def reply(self, *runs: dict[str, Any], after_s: float = CACHE_TTL_S, **more: Any) -> dict[str, Any]:
        answer = self.post(*runs, after_s=after_s, **more)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    def order(self, *runs: dict[str, Any], after_s: float = CACHE_TTL_S, **more: Any) -> dict[str, Any]:
        (order,) = self.reply(*runs, after_s=after_s, **more)["runs"]
        return dict(order)

    def begin(self) -> BegunRun:
        snapshot = self.service.store.load().snapshot
        job, now_s = snapshot.jobs[self.job_id], self.service.clock.now_s()
        agents, seats = {(self.job_id, "t0"): "p1"}, snapshot.rank_placement(job.allocation)
        run = build_begun_run(job, seats, agents, now_s, master=MASTER, in_pods=True)
        assert self.log.begin_run(run, epoch=1)
        return run

    @property
    def report(self) -> AgentReport:
        (report,) = self.log.list_reports()
        return report


@pytest.fixture
def agent(fleet: ApiService) -> Agent:
    return Agent(fleet)


def running(generation: int = 1, **status: object) -> dict[str, Any]:
    rank = {"rank": 0, "status": {"phase": "running", "step": 3, **status}, "written_at_ns": 5}
    return {"generation": generation, "ranks": [rank]}


def prepared(generation: int = 1) -> dict[str, Any]:
    return {"generation": 0, "prepared": generation, "master_port": 29500}


def test_an_agent_prepares_the_run_of_its_node_with_all_that_ranks_need(agent: Agent) -> None:
    reply = agent.reply()
    assert (reply["disconnect_s"], reply["done"], reply["failed"]) == (120.0, False, False)
    (order,) = reply["runs"]
    assert (order["generation"], order["begin"], order["notice"], order["is_recorded"]) == (1, None, None, False)
    document = RunDocument.from_document(order["document"])
    assert (document.job_id, document.node, document.generation) == (agent.job_id, "t0", 1)
    assert (document.world_size, document.command, document.steps) == (2, ("python", "train.py"), 1000)
    assert [(seat.rank, seat.local_rank, seat.gpu) for seat in document.ranks] == [(0, 0, 0), (1, 1, 1)]
    assert document.env == {"SEED": "7"}
    assert document.plan == agent.service.store.load().snapshot.jobs[agent.job_id].allocation.plan
    assert verify_worker_token(SECRET, document.token, agent.job_id, 1)
    assert agent.log.list_reports() == (), "an agent without runs has nothing to report"


def test_a_prepared_run_begins_where_its_ranks_meet(agent: Agent) -> None:
    order = agent.order(prepared())
    assert (order["document"], order["begin"], order["is_recorded"]) == (None, None, False)
    assert (agent.report.prepared, agent.report.address, agent.report.master_port) == (1, "10.1.0.2", 29500)
    agent.begin()
    assert agent.order(prepared())["begin"] == {"host": "10.1.0.2", "port": 29500}


def test_a_run_begins_in_one_pod_only(agent: Agent) -> None:
    agent.begin()
    order = agent.order(running())
    assert (order["generation"], order["begin"], order["kill"]) == (1, None, "")
    assert agent.order(prepared(), pod="p2")["begin"] is None


@pytest.mark.parametrize("has_kill_order", [True, False])
def test_a_run_with_a_kill_order_or_an_end_begins_nowhere(agent: Agent, has_kill_order: bool) -> None:
    agent.begin()
    if has_kill_order:
        agent.log.record_kill_order(agent.job_id, 1, KillOrder(9e9), epoch=1)
    else:
        agent.log.record_end(Run(agent.job_id, 1, RunPhase.LOST), epoch=1)
    assert agent.order(prepared())["begin"] is None


def test_a_newer_generation_is_prepared_while_the_older_one_is_asked_to_leave(agent: Agent) -> None:
    agent.begin()
    agent.service.http.patch(f"/v1/jobs/{agent.job_id}", json={"gpus": {"max": 1}})
    agent.service.tick()
    order = agent.order(running())
    assert (order["generation"], order["document"]["generation"]) == (2, 2)
    assert order["notice"]["action"] == "replan"
    assert order["notice"]["seconds_left"] > 0


@pytest.mark.parametrize(
    ("kill_order", "reason"),
    [
        (KillOrder(0.0, fault="rank 1 was ended by SIGSEGV"), "rank 1 was ended by SIGSEGV"),
        (KillOrder(0.0, loss="it was killed at its deadline"), "it was killed at its deadline"),
        (KillOrder(0.0), "rank 0 ended some time ago"),
        (KillOrder(9e9), ""),
    ],
)
def test_ranks_are_killed_at_the_time_of_the_kill_order(agent: Agent, kill_order: KillOrder, reason: str) -> None:
    agent.begin()
    agent.log.record_kill_order(agent.job_id, 1, kill_order, epoch=1)
    assert agent.order(running())["kill"] == reason


def test_unknown_ranks_are_killed(agent: Agent) -> None:
    run = agent.begin()
    assert agent.order(running())["kill"] == ""
    assert agent.order(running(), pod="p2")["kill"] == "another agent runs this generation on this node"
    agent.log.record_end(Run(agent.job_id, 1, RunPhase.LOST), epoch=1)
    assert agent.order(running())["kill"] == "the run has ended"
    agent.log.begin_run(replace(run, generation=2), epoch=1)
    agent.log.delete_runs(agent.job_id, up_to_generation=1, epoch=1)
    assert agent.order(running())["kill"] == "a newer generation has started and this one is unknown"


def test_an_end_is_forgotten_once_it_is_recorded(agent: Agent) -> None:
    agent.begin()
    ended = running(phase="succeeded")
    ended["ranks"][0] |= {"exit_code": 0}
    assert agent.order(ended)["is_recorded"] is False
    agent.log.record_end(Run(agent.job_id, 1, RunPhase.SUCCEEDED), epoch=1)
    assert agent.order(ended)["is_recorded"] is True


def test_agents_of_an_ended_job_are_done(agent: Agent) -> None:
    agent.service.http.delete(f"/v1/jobs/{agent.job_id}")
    for _ in range(3):
        agent.service.tick()
    reply = agent.reply(running(), wait_s=30.0)
    assert (reply["done"], reply["failed"]) == (True, False)
    (order,) = reply["runs"]
    assert (order["generation"], order["kill"]) == (0, "its job is gone")
    assert agent.log.list_reports() == (), "nobody would ever forget it"


def test_a_reply_states_how_long_it_waited(agent: Agent) -> None:
    agent.begin()
    assert agent.reply(running())["waited_s"] < 0.2
    assert 0.3 <= agent.reply(running(), wait_s=0.3)["waited_s"] < 3.0


def test_reports_are_stored_unless_only_steps_have_changed(agent: Agent) -> None:
    agent.reply(running())
    first = agent.report
    assert first.ranks == (RankReport(0, status=first.ranks[0].status),)
    status = first.ranks[0].status
    assert status is not None
    assert (status.phase, status.step, status.written_at_ns) == (RankPhase.RUNNING, 3, 5)
    agent.reply(running(step=4, loss=0.5), after_s=1.0)
    assert agent.report == first
    agent.reply(running(step=9), after_s=HEARTBEAT_INTERVAL_S)
    assert agent.report.at_s > first.at_s
    assert agent.report.since_s == first.since_s
    ended = running(phase="left", step=9)
    ended["ranks"][0] |= {"exit_code": 0}
    agent.reply(ended, after_s=1.0)
    assert agent.report.ranks[0].exit_code == 0
    agent.reply(running(2), after_s=1.0)
    assert agent.report.since_s == agent.report.at_s


def test_a_deleted_report_is_stored_again_with_the_next_heartbeat(agent: Agent) -> None:
    agent.reply(running())
    agent.log.delete_runs(agent.job_id, up_to_generation=1, epoch=1)
    agent.reply(running(), after_s=HEARTBEAT_INTERVAL_S)
    assert agent.report.pod == "p1"


def test_only_the_token_of_the_jobs_agents_is_accepted(agent: Agent, problem: Problem) -> None:
    path, report = f"/v1/jobs/{agent.job_id}/agents/t0", {"pod": "p1", "address": "10.1.0.2"}
    assert problem(agent.service.post(path, report), 401)["type"] == "urn:ebbtide:problem:unauthenticated"
    workers, others = issue_worker_token(SECRET, agent.job_id, 1), issue_agent_token(SECRET, "other")
    for token in (workers, others, workers.replace("ebt_", "eba_")):
        problem(agent.service.post(path, report, token=token), 403)
    progress = {"generation": 1, "step": 1}
    problem(agent.service.post(f"/v1/jobs/{agent.job_id}/progress", progress, token=agent.token), 403)
    assert agent.log.list_reports() == ()


def test_an_unknown_job_or_node_is_a_404_and_a_foreign_run_is_refused(agent: Agent, problem: Problem) -> None:
    problem(agent.post(running(), node="nowhere"), 404)
    token, report = issue_agent_token(SECRET, "nothing-abc"), {"pod": "p1", "address": "10.1.0.2"}
    problem(agent.service.post("/v1/jobs/nothing-abc/agents/t0", report, token=token), 404)
    foreign = {**running(), "job_id": "other"}
    assert problem(agent.post(foreign), 422)["errors"][0]["field"] == "runs.0"
    assert agent.log.list_reports() == ()


@pytest.mark.parametrize(
    ("field", "run", "more"),
    [
        ("pod", {}, {"pod": ""}),
        ("address", {}, {"address": ""}),
        ("runs.0.generation", {"generation": -1}, {}),
        ("runs.0.ranks.0.rank", {"ranks": [{"rank": -1}]}, {}),
        ("runs.0.ranks.0.exit_code", {"ranks": [{"rank": 0, "exit_code": 1.5}]}, {}),
        ("ranks.0.status", {"ranks": [{"rank": 0, "status": {"phase": "flying"}}]}, {}),
        ("runs.0.ranks.0.tail", {"ranks": [{"rank": 0, "tail": "x" * 10_000}]}, {}),
        ("mood", {}, {"mood": "good"}),
    ],
)
def test_a_malformed_report_names_its_field(
    agent: Agent, problem: Problem, field: str, run: dict[str, Any], more: dict[str, Any]
) -> None:
    assert problem(agent.post({"generation": 1, **run}, **more), 422)["errors"][0]["field"] == field
    assert agent.log.list_reports() == ()


def test_only_the_agent_of_rank_0_gets_the_checkpoint_notice(agent: Agent) -> None:
    agent.begin()
    assert agent.order(running())["notice"] is None
    job = agent.service.store.load().snapshot.jobs[agent.job_id]
    request = CheckpointRequest(asked_at_s=7.5, generation=1, steps=3.0)
    notice = {"action": "checkpoint", "step": 3, "seconds_left": None, "request": "7.5"}
    other = replace(agent.report, ranks=(replace(agent.report.ranks[0], rank=1),))
    later = replace(agent.report, generation=2)
    requested_job = replace(job, save_wish=request)
    assert [checkpoint_notice(requested_job, report) for report in (agent.report, other, later)] == [notice, None, None]
    granted = replace(requested_job, progress=replace(job.progress, checkpoint_steps=3.0))
    undated = replace(job, save_wish=replace(request, steps=None))
    assert [checkpoint_notice(each, agent.report) for each in (job, granted, undated)] == [None, None, None]
