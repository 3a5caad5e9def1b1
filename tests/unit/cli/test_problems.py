"""`ebbtide problems`: its table, its JSON and its exit code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from cli.exit_codes import ExitCode
from scheduler.domain.problems import Problem, ProblemCode, ProblemEpisode, Severity, SubjectKind

Ask = Callable[..., Any]
Run = Callable[..., Result]


def a_problem(number: int, severity: Severity) -> Problem:
    return Problem(
        ProblemCode.NODE_DOWN,
        severity,
        SubjectKind.NODE,
        f"t{number}",
        f"Node t{number} of pool training is down with 4 GPUs.",
        "Repair the machine.",
        f"ebbtide events t{number}",
        numbers={"gpus": 4.0},
    )


def plant(monkeypatch: pytest.MonkeyPatch, *problems: Problem) -> None:
    monkeypatch.setattr("api.problems.find_problems", lambda snapshot, evidence: problems)


def test_no_problems_is_success(run: Run, ask: Ask, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert ask("problems")["items"] == []
    result = run("problems")
    assert (result.exit_code, len(result.stdout.splitlines())) == (ExitCode.OK, 1)


def test_warnings_are_success(run: Run, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *(a_problem(number, Severity.WARNING) for number in range(8)))
    result = run("problems")
    assert result.exit_code == ExitCode.OK
    assert "8 warnings" in result.stdout
    assert result.stdout.count("Repair the machine. Run `ebbtide events t") == 5
    assert "3 more" in result.stdout


def test_critical_problem_fails(run: Run, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, a_problem(0, Severity.CRITICAL), a_problem(1, Severity.WARNING))
    assert run("problems").exit_code == ExitCode.FAILED
    assert run("problems", "-o", "json").exit_code == ExitCode.FAILED


def test_resolved_problems_are_listed_on_demand(
    run: Run, ask: Ask, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    now_s = time.time()
    ended = ProblemEpisode(
        "a", ProblemCode.NODE_DOWN, Severity.WARNING, SubjectKind.NODE, "t0", "Node t0 is down.", "", "training",
        now_s - 7200.0, times=3, end_s=now_s - 3600.0, ending="The node is up again.", is_closed=True,
    )  # fmt: skip
    fleet.store.problems.put_episodes((ended,), epoch=1)
    assert ask("problems")["resolved"] == []
    assert [each["id"] for each in ask("problems", "--since", "2h")["resolved"]] == ["a"]
    assert ask("problems", "--since", "30m")["resolved"] == []
    table = run("problems", "--since", "1d").stdout
    assert "NodeDown, 1h00m, 3 times" in table
    assert ended.ending in table
    assert run("problems", "--since", "yesterday").exit_code == ExitCode.USAGE
