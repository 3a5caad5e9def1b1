"""Which jobs `ebbtide ps` shows, and which job a name or the beginning of an id stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import Result

from cli.commands.jobs import RECENT_FAILURES_S
from cli.exit_codes import ExitCode
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation, RunPhase
from tests.unit.cli.conftest import InProcessService

Ask = Callable[..., Any]
Run = Callable[..., Result]


def submit(service: InProcessService, name: str, **fields: Any) -> str:
    document = {"name": name, "gpus": {"min": 1, "max": 2}, "command": ["x"], "steps": 100, **fields}
    with service.client() as client:
        return client.submit(document)["id"]


def end(service: InProcessService, job_id: str) -> None:
    with service.client() as client:
        client.cancel(job_id)
    for _ in range(3):
        service.tick()


def fail(service: InProcessService, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a job without retries whose first run has failed."""
    job_id = submit(service, "hopeless", retries=0)
    service.tick()
    service.tick()
    observe = service.executor.observe

    def observe_failure() -> Observation:
        seen = observe()
        runs = (replace(run, phase=RunPhase.FAILED) if run.job_id == job_id else run for run in seen.runs)
        return replace(seen, runs=tuple(runs))

    with monkeypatch.context() as patched:
        patched.setattr(service.executor, "observe", observe_failure)
        service.tick()
    service.tick()
    with service.client() as client:
        assert client.job(job_id)["state"] == JobState.FAILED
    return job_id


def test_ps_shows_live_jobs_and_recent_failures(
    ask: Ask, fleet: InProcessService, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, live = submit(fleet, "over"), submit(fleet, "live")
    end(fleet, cancelled)
    failed = fail(fleet, monkeypatch)
    assert [job["id"] for job in ask("ps")] == [failed, live]
    assert {job["id"] for job in ask("ps", "--all")} == {failed, live, cancelled}
    assert [job["id"] for job in ask("ps", "--state", "cancelled")] == [cancelled]
    fleet.clock.move_to(fleet.clock.now_s() + RECENT_FAILURES_S)
    assert [job["id"] for job in ask("ps")] == [live]
    assert [job["id"] for job in ask("ps", "--state", "failed")] == [failed]


def test_ps_filters_and_limits(run: Run, ask: Ask, fleet: InProcessService) -> None:
    with fleet.client() as client:
        client.create_queue({"name": "blue"})
    one, two, three = submit(fleet, "train-a"), submit(fleet, "train-b", queue="blue"), submit(fleet, "other")
    fleet.tick()
    assert [job["id"] for job in ask("ps", "--queue", "blue")] == [two]
    assert {job["id"] for job in ask("ps", "--name", "train")} == {one, two}
    assert {job["id"] for job in ask("ps", "--mine")} == {one, two, three}
    assert [job["id"] for job in ask("ps", "--mine", "--queue", "blue", "--name", "train", "--state", "live")] == [two]
    limited = run("ps", "--limit", "2", "-o", "json")
    assert (limited.stdout.count('"id"'), "--limit" in limited.stderr) == (2, True)
    assert run("ps", "--limit", "3").stderr == ""
    assert run("ps", "--all", "--state", "live").exit_code == ExitCode.USAGE


def test_labels_are_submitted_changed_and_searched(run: Run, ask: Ask, fleet: InProcessService) -> None:
    labels = ("--label", "team=vision", "--label", "stage=tune")
    tune = ask("submit", "--name", "tune", "--min", "1", *labels, "--command", "true")
    assert tune["labels"] == {"stage": "tune", "team": "vision"}
    other = submit(fleet, "other", labels={"team": "speech"})
    fleet.tick()
    assert [job["id"] for job in ask("ps", "-l", "team=vision")] == [tune["id"]]
    assert [job["id"] for job in ask("ps", "--selector", "team!=vision,!stage")] == [other]
    assert "team=vision" in run("ps", "--show-labels").stdout
    assert "team=vision" not in run("ps").stdout
    assert ask("label", "tune", "team=audio", "stage-")["labels"] == {"team": "audio"}
    fleet.tick()
    assert ask("describe", "tune")["labels"] == {"team": "audio"}
    assert "team=audio" in run("describe", "tune").stdout
    for words in (("label", "tune", "team"), ("label", "tune"), ("label", "tune", "=a")):
        assert run(*words).exit_code == ExitCode.USAGE, words
    for words in (("label", "tune", "a b=c"), ("ps", "-l", "a b")):
        assert run(*words).exit_code != 0, words


@pytest.mark.parametrize("verb", ["describe", "explain", "history", "suspend", "cancel"])
def test_a_verb_takes_a_name_or_the_beginning_of_an_id(ask: Ask, fleet: InProcessService, verb: str) -> None:
    job_id = submit(fleet, "hello")
    submit(fleet, "world")
    fleet.tick()
    for reference in ("hello", job_id[:-4], "hel"):
        answer = ask(verb, reference)
        assert answer.get("id", answer.get("job_id", job_id)) == job_id


def test_an_ambiguous_name_lists_the_jobs(run: Run, ask: Ask, fleet: InProcessService) -> None:
    first, second = submit(fleet, "train"), submit(fleet, "train")
    longer = submit(fleet, "train-2")
    fleet.tick()
    result = run("describe", "train")
    assert result.exit_code == ExitCode.USAGE
    assert (first in result.stderr, second in result.stderr, longer in result.stderr) == (True, True, False)
    assert ask("describe", "train-2")["id"] == longer
    end(fleet, first)
    assert ask("describe", "train")["id"] == second  # the only live one
    assert ask("describe", first)["id"] == first


def test_a_live_job_is_found_behind_any_number_of_newer_ended_ones(
    ask: Ask, fleet: InProcessService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.job_lookup.CANDIDATES_MAX", 2)
    live = submit(fleet, "train")
    for _ in range(3):
        fleet.clock.move_to(fleet.clock.now_s() + 1.0)
        end(fleet, submit(fleet, "train"))
    assert ask("describe", "train")["id"] == live


def test_no_match_is_not_found(run: Run, fleet: InProcessService) -> None:
    result = run("cancel", "ghost")
    assert (result.exit_code, "ghost" in result.stderr) == (ExitCode.NOT_FOUND, True)


def test_the_explanation_of_an_ended_job_needs_no_gpus(run: Run, fleet: InProcessService) -> None:
    job_id = submit(fleet, "over")
    end(fleet, job_id)
    result = run("explain", job_id)
    assert (result.exit_code, "needs" in result.stdout, "GPU" in result.stdout) == (0, False, False)
