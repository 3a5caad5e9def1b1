"""`ebbtide explain pool` and `ebbtide lending veto`, against the real API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.testing import Result

from cli.commands.pool_explanation import describe_shadow
from cli.exit_codes import ExitCode

Ask = Callable[..., Any]
Run = Callable[..., Result]


def test_pool_is_told_from_a_job_by_a_second_word(run: Run, ask: Ask, fleet: Any) -> None:
    found = ask("explain", "pool", "serving")
    assert (found["pool"], found["code"]) == ("serving", "NoDemand")
    ask("lending", "pause")
    table = run("explain", "pool", "serving").stdout
    for part in ("NoDemand", "lending is paused, set by"):
        assert part in table
    assert ask("submit", "--name", "pool", "--min", "1", "--command", "true")["name"] == "pool"
    assert ask("explain", "pool")["job_id"].startswith("pool-")


def test_second_word_after_anything_but_pool_is_refused(run: Run, fleet: Any) -> None:
    assert run("explain", "train", "serving").exit_code == ExitCode.USAGE
    assert run("explain", "pool", "training").exit_code == ExitCode.REFUSED


def test_shadow_is_one_sentence_with_its_numbers() -> None:
    shadow = {"since_s": 0.0, "nodes": ["i0"], "gpus": 4.0, "gpu_hours": 1240.4, "loans": 31, "recalls": 12}
    text = describe_shadow({**shadow, "intervals": 2592, "short_intervals": 0})
    assert "1,240 GPU-hours in 31 loans, 12 of them recalled, with 0 of 2,592 intervals short" in text


def test_unknown_loan_cannot_be_vetoed(run: Run, fleet: Any) -> None:
    assert run("lending", "veto", "i0-1", "--reason", "no").exit_code == ExitCode.NOT_FOUND
