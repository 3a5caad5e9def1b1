"""Node agents report over HTTP and get their assignment in the reply."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from api.agent_assignments import checkpoint_notice
from api.agent_state import CACHE_TTL_S, HEARTBEAT_INTERVAL_S
from scheduler.domain.checkpoints import CheckpointRequest
from scheduler.domain.observation import AgentReport, BegunRun, KillOrder, RankPhase, RankReport, Run, RunPhase
from scheduler.domain.parallel_plan import plan_from_json
from scheduler.domain.worker_token import issue_agent_token, issue_worker_token, verify_worker_token
from scheduler.executors.reported_runs import build_begun_run

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem

SECRET = b"a secret that only tests know...."
IDLE: dict[str, Any] = {"pod": "p1", "generation": 0}


class Agent:
    """The agent `p1` of a running job on node t0, with the run log behind the API."""

    def __init__(self, service: ApiService) -> None:
        self.service = service
        self.job_id = service.submit(command=["python", "train.py"], env={"SEED": "7"})
        service.tick()
        service.tick()
        self.token = issue_agent_token(SECRET, self.job_id)
        self.log = service.run_log

    def post(self, statement: dict[str, Any], *, after_s: float = CACHE_TTL_S, node: str = "t0") -> Any:
        """Post a report `after_s` later and return the reply."""
        self.service.clock.move_to(self.service.clock.now_s() + after_s)
        return self.service.post(f"/v1/jobs/{self.job_id}/agents/{node}", statement, token=self.token)

    def report_state(self, statement: dict[str, Any], *, after_s: float = CACHE_TTL_S) -> dict[str, Any]:
        answer = self.post(statement, after_s=after_s)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    def begin(self) -> BegunRun:
        snapshot = self.service.store.load().snapshot
        job = snapshot.jobs[self.job_id]
        agents = {(self.job_id, "t0"): "p1"}
        run = build_begun_run(job, snapshot.rank_placement(job.allocation), agents, self.service.clock.now_s())
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
    return {"pod": "p1", "generation": generation, "ranks": [rank]}


def test_an_agent_waits_until_its_generation_starts(agent: Agent) -> None:
    reply = agent.report_state(IDLE)
    assert (reply["generation"], reply["begun"], reply["ranks"], reply["notice"]) == (1, False, [], None)
    assert agent.report == AgentReport(agent.job_id, "t0", "p1", agent.report.at_s, since_s=agent.report.at_s)
    assert agent.service.store.count_pending_commands() == 0


def test_the_assignment_has_everything_that_ranks_need(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_API", "its own")
    run = agent.begin()
    reply = agent.report_state(IDLE)
    assert (reply["generation"], reply["begun"], reply["world_size"]) == (1, True, 2)
    assert (reply["command"], reply["steps"]) == (["python", "train.py"], 1000)
    assert plan_from_json(reply["plan"]) == run.plan
    assert [(rank["rank"], rank["local_rank"], rank["gpu"]) for rank in reply["ranks"]] == [(0, 0, 0), (1, 1, 1)]
    env = reply["ranks"][1]["env"]
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["SEED"]) == ("1", "2", "1", "7")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "29400")
    assert verify_worker_token(SECRET, env["EBBTIDE_TOKEN"], agent.job_id, 1)
    assert env["EBBTIDE_URL"] == "http://127.0.0.1:8787"
    assert "OF_THE_API" not in env


def test_running_ranks_are_assigned_to_one_agent_only(agent: Agent) -> None:
    agent.begin()
    running_reply = agent.report_state(running())
    assert (running_reply["generation"], running_reply["begun"], running_reply["ranks"]) == (1, True, [])
    assert agent.report_state({"pod": "p2", "generation": 0})["begun"] is False


@pytest.mark.parametrize("has_kill_order", [True, False])
def test_a_run_with_a_kill_order_or_an_end_is_assigned_to_no_agent(agent: Agent, has_kill_order: bool) -> None:
    agent.begin()
    if has_kill_order:
        agent.log.record_kill_order(agent.job_id, 1, KillOrder(9e9), epoch=1)
    else:
        agent.log.record_end(Run(agent.job_id, 1, RunPhase.LOST), epoch=1)
    assert agent.report_state(IDLE)["begun"] is False


def test_a_run_stays_assigned_until_it_ends_even_if_a_newer_generation_is_due(agent: Agent) -> None:
    agent.begin()
    agent.service.http.patch(f"/v1/jobs/{agent.job_id}", json={"gpus": {"max": 1}})
    agent.service.tick()
    reply = agent.report_state(IDLE)
    assert (reply["generation"], reply["begun"], len(reply["ranks"])) == (1, True, 2)
    reply = agent.report_state(running())
    assert reply["notice"]["action"] == "replan"
    assert reply["notice"]["seconds_left"] > 0


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
    assert agent.report_state(running())["kill"] == reason


def test_unknown_ranks_are_killed(agent: Agent) -> None:
    run = agent.begin()
    assert agent.report_state(running())["kill"] == ""
    assert agent.report_state({**running(), "pod": "p2"})["kill"] == "another agent runs this generation on this node"
    agent.log.record_end(Run(agent.job_id, 1, RunPhase.LOST), epoch=1)
    assert agent.report_state(running())["kill"] == "the run has ended"
    agent.log.begin_run(replace(run, generation=2), epoch=1)
    agent.log.delete_runs(agent.job_id, up_to_generation=1, epoch=1)
    assert agent.report_state(running())["kill"] == "a newer generation has started and this one is unknown"


def test_agents_of_an_ended_job_are_done(agent: Agent) -> None:
    agent.service.http.delete(f"/v1/jobs/{agent.job_id}")
    for _ in range(3):
        agent.service.tick()
    reply = agent.report_state(running())
    assert (reply["generation"], reply["done"], reply["failed"], reply["kill"]) == (0, True, False, "")
    assert reply["notice"]["action"] == "leave"
    assert agent.log.list_reports() == (), "nobody would ever forget it"


def test_reports_are_stored_unless_only_steps_have_changed(agent: Agent) -> None:
    agent.report_state(running())
    first = agent.report
    assert first.ranks == (RankReport(0, status=first.ranks[0].status),)
    status = first.ranks[0].status
    assert status is not None
    assert (status.phase, status.step, status.written_at_ns) == (RankPhase.RUNNING, 3, 5)
    agent.report_state(running(step=4, loss=0.5), after_s=1.0)
    assert agent.report == first
    agent.report_state(running(step=9), after_s=HEARTBEAT_INTERVAL_S)
    assert agent.report.at_s > first.at_s
    assert agent.report.since_s == first.since_s
    ended = running(phase="left", step=9)
    ended["ranks"][0] |= {"exit_code": 0}
    agent.report_state(ended, after_s=1.0)
    assert agent.report.ranks[0].exit_code == 0
    agent.report_state(running(2), after_s=1.0)
    assert agent.report.since_s == agent.report.at_s


def test_a_deleted_report_is_stored_again_with_the_next_heartbeat(agent: Agent) -> None:
    agent.report_state(IDLE)
    agent.log.delete_runs(agent.job_id, up_to_generation=0, epoch=1)
    agent.report_state(IDLE, after_s=HEARTBEAT_INTERVAL_S)
    assert agent.report.pod == "p1"


def test_only_the_token_of_the_jobs_agents_is_accepted(agent: Agent, problem: Problem) -> None:
    path = f"/v1/jobs/{agent.job_id}/agents/t0"
    assert problem(agent.service.post(path, IDLE), 401)["type"] == "urn:ebbtide:problem:unauthenticated"
    workers, others = issue_worker_token(SECRET, agent.job_id, 1), issue_agent_token(SECRET, "other")
    for token in (workers, others, workers.replace("ebt_", "eba_")):
        problem(agent.service.post(path, IDLE, token=token), 403)
    report = {"generation": 1, "step": 1}
    problem(agent.service.post(f"/v1/jobs/{agent.job_id}/progress", report, token=agent.token), 403)
    assert agent.log.list_reports() == ()


def test_an_unknown_job_or_node_is_a_404(agent: Agent, problem: Problem) -> None:
    problem(agent.post(IDLE, node="nowhere"), 404)
    token = issue_agent_token(SECRET, "nothing-abc")
    problem(agent.service.post("/v1/jobs/nothing-abc/agents/t0", IDLE, token=token), 404)
    assert agent.log.list_reports() == ()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("pod", {"pod": ""}),
        ("generation", {"generation": -1}),
        ("ranks.0.rank", {"ranks": [{"rank": -1}]}),
        ("ranks.0.exit_code", {"ranks": [{"rank": 0, "exit_code": 1.5}]}),
        ("ranks.0.status", {"ranks": [{"rank": 0, "status": {"phase": "flying"}}]}),
        ("ranks.0.tail", {"ranks": [{"rank": 0, "tail": "x" * 10_000}]}),
        ("mood", {"mood": "good"}),
    ],
)
def test_a_malformed_report_names_its_field(agent: Agent, problem: Problem, field: str, change: dict[str, Any]) -> None:
    assert problem(agent.post({**IDLE, **change}), 422)["errors"][0]["field"] == field
    assert agent.log.list_reports() == ()


def test_only_the_agent_of_rank_0_gets_the_checkpoint_notice(agent: Agent) -> None:
    agent.begin()
    assert agent.report_state(running())["notice"] is None
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
