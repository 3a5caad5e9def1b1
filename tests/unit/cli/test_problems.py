"""`ebbtide problems`: its table, its JSON and its exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from cli.exit_codes import ExitCode
from scheduler.domain.problems import Problem, ProblemCode, Severity, SubjectKind

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
    monkeypatch.setattr("api.problem_cache.find_problems", lambda snapshot, evidence: problems)


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
