"""Rejections by the service: the exit code names the kind of error, and stderr has one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from cli.exit_codes import ExitCode

Ask = Callable[..., Any]
Run = Callable[..., Result]

REFUSED = [
    (("nodes", "add", "t0", "--pool", "training", "--gpu", "a100-80g", "--gpus", "8"), "gpus: got 8"),
    (("nodes", "add", "t1", "--pool", "nowhere", "--gpu", "a100-80g", "--gpus", "8"), 'pool: got "nowhere"'),
    (("nodes", "add", "t1", "--pool", "training", "--gpu", "gtx-1", "--gpus", "8"), '"gtx-1"'),
    (("nodes", "add", "t1", "--pool", "training", "--gpu", "a100-80g", "--gpus", "0"), "gpus: got 0"),
    (("nodes", "add", "t1", "--pool", "training", "--gpu", "a100-80g", "--gpus", "1", "--memory", "lots"), "memory"),
    (("pools", "create", "x", "--kind", "gaming"), 'kind: got "gaming"'),
    (("pools", "create", "serving", "--kind", "training"), "kind"),
    (("pools", "delete", "serving"), "i0"),
    (("ps", "--state", "asleep"), 'state: got "asleep"'),
    (("submit", "--name", "x", "--min", "1", "--model", "gpt9", "--global-batch", "8", "true"), "gpt9"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_a_rejected_request_names_its_field_and_changes_nothing(
    run: Run, ask: Ask, fleet: Any, words: tuple[str, ...], message: str
) -> None:
    before = ask("snapshot")
    result = run(*words, "-o", "json")
    error = json.loads(result.stderr)["error"]
    code = ExitCode.REFUSED if error["status"] == 409 else ExitCode.USAGE
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert message in error["message"]
    assert result.stderr.count("\n") == 1
    fleet.tick()
    after = ask("snapshot")
    assert (after["nodes"], after["pools"], after["jobs"]) == (before["nodes"], before["pools"], before["jobs"])


@pytest.mark.parametrize("words", [("describe",), ("cancel",), ("cordon",), ("pools", "delete"), ("explain",)])
def test_unknown_resource_fails_with_its_name(run: Run, fleet: Any, words: tuple[str, ...]) -> None:
    result = run(*words, "ghost")
    assert (result.exit_code, result.stdout) == (ExitCode.NOT_FOUND, "")
    assert "ghost" in result.stderr
