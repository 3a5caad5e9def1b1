"""Trials of templates: which are sent, and what their answers mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.job import Job
from scheduler.domain.pod_requirements import AddedRequirements
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.agent_injection import AgentDelivery, AgentImage
from scheduler.kubernetes.api_error import parse_status_error
from scheduler.kubernetes.client import connect
from scheduler.kubernetes.manifests import ManifestContext
from scheduler.kubernetes.template_reviews import ATTEMPTS_MAX, REREAD_S, TemplateReviews, describe_rejection
from tests.builders import a_job
from tests.unit.kubernetes.scripted_server import Answer, ScriptedServer
from tests.unit.kubernetes.test_flow_control import QUICK, kubeconfig

FIELD_ERROR = {"field": "spec.volumes[0].hostPath.path", "reason": "FieldValueRequired", "message": "Required value"}


def status(code: int, message: str, *causes: dict[str, str]) -> Answer:
    return Answer(code, {"kind": "Status", "code": code, "message": message, "details": {"causes": list(causes)}})


INVALID = status(422, 'Pod "ebbtide-trial" is invalid', FIELD_ERROR)


class Trials:
    """Reviews against a scripted server, with a manual clock."""

    def __init__(self, folder: Path, url: str) -> None:
        self.now_s = 0.0
        cluster = connect(kubeconfig(folder, url), limits=QUICK)
        self.reviews = TemplateReviews(cluster, self._context, lambda: self.now_s)

    def run(self, *jobs: Job) -> int:
        """Run all trials that are due, and return how many they were."""
        due = list(self.reviews.plan_trials(Snapshot(jobs={job.id: job for job in jobs})))
        for trial in due:
            trial.run()
        return len(due)

    def error(self, job: Job) -> str | None:
        review = self.reviews.list_reviews().get(job.id)
        return None if review is None else review.error

    def _context(self, job: Job) -> ManifestContext:
        return ManifestContext("jobs", 1, "http://api", "worker", AgentImage("agent"), owner_uid=job.id)


def templated(job_id: str, image: str = "a", env: dict[str, str] | None = None, **more: Any) -> Job:
    template = {"spec": {"containers": [{"name": "main", "image": image}]}}
    return a_job(job_id, 1, template_json=json.dumps(template), env=env or {}, **more)


def test_jobs_of_one_template_share_one_request(tmp_path: Path) -> None:
    jobs = [templated(f"job-{number}", env={"RATE": str(number)}) for number in range(1000)]
    with ScriptedServer(Answer(), Answer()).running() as server:
        trials = Trials(tmp_path, server.url)
        assert trials.run(*jobs) == 1
        assert {trials.error(job) for job in jobs} == {""}
        trials.now_s += 10 * REREAD_S
        assert trials.run(*jobs) == 0
        assert trials.run(*jobs, templated("other", image="b")) == 1
        assert server.heard == ["POST /api/v1/namespaces/jobs/pods"] * 2


def test_what_admission_adds_is_part_of_the_answer(tmp_path: Path) -> None:
    """Tolerations that every pod with GPUs gets are no addition."""
    usual = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}
    admitted = {
        "spec": {"containers": [], "overhead": {"cpu": "1"}, "nodeSelector": {"a": "b"}, "tolerations": [usual]}
    }
    job = templated("job")
    with ScriptedServer(Answer(201, admitted)).running() as server:
        trials = Trials(tmp_path, server.url)
        trials.run(job)
        added = trials.reviews.list_reviews()["job"].added
    assert added == AddedRequirements(steady=(("cpu", 1000),), selector=(("a", "b"),))


def test_rejection_names_the_field_and_is_tried_again(tmp_path: Path) -> None:
    job = templated("job")
    with ScriptedServer(INVALID, Answer()).running() as server:
        trials = Trials(tmp_path, server.url)
        trials.run(job)
        assert trials.error(job) == "template.spec.volumes[0].hostPath.path: Required value"
        assert trials.run(job) == 0
        trials.now_s += REREAD_S
        assert trials.run(job) == 1
        assert trials.error(job) == ""


@pytest.mark.parametrize(
    ("answer", "rejects"),
    [
        (status(403, 'violates PodSecurity "restricted"'), True),
        (status(403, "exceeded quota: small"), True),
        (status(404, 'namespaces "nowhere" not found'), True),
        (status(500, "failed calling webhook x: connection refused"), True),
        (status(400, "admission webhook x does not support dry run"), False),
        (status(409, "AlreadyExists"), None),
    ],
)
def test_answers(tmp_path: Path, answer: Answer, rejects: bool | None) -> None:
    job = templated("job")
    with ScriptedServer(answer).running() as server:
        trials = Trials(tmp_path, server.url)
        trials.run(job)
        error = trials.error(job)
        assert (None if error is None else bool(error)) is rejects


def test_silent_server_holds_a_job_up_for_a_few_trials_only(tmp_path: Path) -> None:
    job = templated("job")
    with ScriptedServer(*[Answer(503)] * ATTEMPTS_MAX).running() as server:
        trials = Trials(tmp_path, server.url)
        for _ in range(ATTEMPTS_MAX):
            assert trials.error(job) is None
            assert trials.run(job) == 1
        assert trials.error(job) == ""
        assert trials.run(job) == 0


def test_plain_and_placed_jobs_are_not_tried(tmp_path: Path) -> None:
    trials = Trials(tmp_path, "http://127.0.0.1:1")
    placed = a_job("placed", 1, on={"t0": (0,)})
    running = replace(templated("running"), state=placed.state.RUNNING, allocation=placed.allocation)
    assert trials.run(a_job("plain", 1), running) == 0


@pytest.mark.parametrize(("delivery", "number"), [(AgentDelivery.INIT_CONTAINER, 0), (AgentDelivery.IMAGE_VOLUME, 1)])
def test_paths_do_not_count_the_init_container_of_the_agent(delivery: AgentDelivery, number: int) -> None:
    own = [] if delivery is AgentDelivery.IMAGE_VOLUME else [{"name": "ebbtide-agent"}]
    pod = {"spec": {"initContainers": [*own, {"name": "fetch"}]}}
    cause = {"field": "spec.initContainers[1].image", "message": "Required value"}
    error = parse_status_error({"code": 422, "message": "x", "details": {"causes": [cause]}})
    assert describe_rejection(error, pod) == f"template.spec.initContainers[{number}].image: Required value"
