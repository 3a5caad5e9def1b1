"""Exit codes and JSON errors: which code each kind of failure has, and what a script can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import Result

from cli.exit_codes import MEANINGS, ExitCode, choose_exit_code, wants_json
from ebbtide.client import Client, RetryPolicy
from tests.api.authenticated_service import AuthenticatedService

Ask = Callable[..., Any]
Run = Callable[..., Result]

SERVICE_ERRORS = [
    (("describe", "ghost"), ExitCode.NOT_FOUND, "not-found", 404),
    (("pools", "delete", "serving"), ExitCode.REFUSED, "conflict", 409),
    (("ps", "--state", "asleep"), ExitCode.USAGE, "invalid-input", 422),
]
USAGE_ERRORS = [
    ("ps", "--nonsense"),
    ("nonsense",),
    ("submit", "--min", "two"),
    ("submit", "-f", "missing.yaml"),
    ("scale", "job"),
]


def read_error(result: Result) -> dict[str, Any]:
    assert result.stdout == ""
    document: dict[str, Any] = json.loads(result.stderr.splitlines()[-1])
    assert document.keys() == {"error"}
    error: dict[str, Any] = document["error"]
    assert (error["exit_code"], error["code"]) == (result.exit_code, ExitCode(result.exit_code).label)
    assert error["message"]
    return error


@pytest.mark.parametrize(("words", "code", "slug", "status"), SERVICE_ERRORS, ids=lambda value: str(value))
def test_an_error_of_the_service_has_its_code_and_its_problem(
    run: Run, fleet: Any, words: tuple[str, ...], code: ExitCode, slug: str, status: int
) -> None:
    result = run(*words, "-o", "json")
    assert result.exit_code == code
    error = read_error(result)
    assert (error["status"], error["type"]) == (status, f"urn:ebbtide:problem:{slug}")
    plain = run(*words)
    assert (plain.exit_code, plain.stderr.startswith("Error: ")) == (code, True)


def test_an_error_names_each_invalid_field(run: Run, fleet: Any) -> None:
    words = ("nodes", "add", "t9", "--pool", "training", "--gpu", "a100-80g", "--gpus", "0", "-o", "json")
    assert [each["field"] for each in read_error(run(*words))["errors"]] == ["gpus"]


@pytest.mark.parametrize("words", USAGE_ERRORS, ids=" ".join)
@pytest.mark.parametrize("form", [("-o", "json"), ("--output", "json"), ("--output=json",), ("-ojson",)], ids=" ".join)
def test_a_usage_error_is_json_too(run: Run, words: tuple[str, ...], form: tuple[str, ...]) -> None:
    name, *options = words
    result = run(name, *form, *options)
    assert result.exit_code == ExitCode.USAGE
    assert "status" not in read_error(result)


def test_a_service_that_does_not_answer_is_unavailable(run: Run) -> None:
    assert read_error(run("ps", "-o", "json"))["exit_code"] == ExitCode.UNAVAILABLE


def test_a_missing_and_an_insufficient_token_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    service = AuthenticatedService()
    monkeypatch.setattr("ebbtide.client.Client", partial(Client, transport=service.transport))
    nobody = run("ps", "-o", "json", EBBTIDE_TOKEN="", EBBTIDE_URL="http://service")
    assert (nobody.exit_code, read_error(nobody)["status"]) == (ExitCode.UNAUTHENTICATED, 401)
    viewer = service.token("ada", "viewer")
    refused = run("lending", "pause", "-o", "json", EBBTIDE_TOKEN=viewer, EBBTIDE_URL="http://service")
    assert (refused.exit_code, read_error(refused)["status"]) == (ExitCode.REFUSED, 403)


def test_a_command_of_the_job_is_no_option_of_ebbtide() -> None:
    assert not wants_json(["submit", "--", "python", "x.py", "-o", "json"])
    assert not wants_json(["ps", "-o", "table"])
    assert not wants_json(["ps", "-o"])


def test_every_code_is_documented_and_every_status_has_one() -> None:
    assert list(MEANINGS) == list(ExitCode)
    assert {choose_exit_code(status) for status in range(400, 600)} == set(ExitCode) - {ExitCode.OK}


def test_the_version_is_an_option_too(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout.split()[0], len(result.stdout.splitlines())) == (0, "ebbtide", 1)


def test_a_yaml_error_names_file_line_and_column(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: hello\ngpus: {min: 1, max: 2\ncommand: [x]\n")
    result = run("submit", "-f", str(file), "-o", "json")
    assert result.exit_code == ExitCode.USAGE
    assert read_error(result)["message"].startswith(f"{file} line 3, column 8: ")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: a\ngpus: 4\ncommand: [x]\n", ["gpus: got 4", "{min: 4, max: 4}"]),
        ("name: a\ngpus: {min: 1, max: 1}\ncomand: [x]\n", ["comand: ", "did you mean 'command'"]),
    ],
)
def test_a_wrong_field_is_named_with_what_is_right(run: Run, tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    message = read_error(run("submit", "-f", str(file), "-o", "json"))["message"]
    assert [part for part in parts if part not in message] == []
    assert "got [" not in message


@pytest.mark.parametrize("command", ["submit", "scale"])
def test_gpus_as_an_option_suggests_the_range(run: Run, command: str) -> None:
    message = read_error(run(command, "-o", "json", "--gpus", "4"))["message"]
    assert all(option in message for option in ("--gpus", "--min", "--max"))


def test_a_url_with_the_version_says_which_to_use(run: Run) -> None:
    result = run("ps", "--url", "http://127.0.0.1:1/v1/", "-o", "json")
    assert result.exit_code == ExitCode.USAGE
    assert read_error(result)["message"].endswith("Use http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("status", "code"), [(404, ExitCode.UNAVAILABLE), (501, ExitCode.UNAVAILABLE), (502, ExitCode.UNAVAILABLE)]
)
@pytest.mark.parametrize("words", [("describe", "x"), ("ps",), ("pools", "create", "x", "--kind", "training")])
def test_a_server_that_is_not_ebbtide_is_told_apart_from_a_missing_resource(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], status: int, code: ExitCode
) -> None:
    """Another program answers at the URL with a page of its own, or with JSON without a problem type."""
    for answer in (httpx.Response(status, html="<p>no"), httpx.Response(status, json={"detail": "Not Found"})):
        retries = RetryPolicy(attempts=1)
        transport = httpx.MockTransport(lambda _request, answer=answer: answer)
        monkeypatch.setattr("ebbtide.client.Client", partial(Client, transport=transport, retries=retries))
        result = run(*words, "-o", "json")
        assert result.exit_code == code
        assert ("http://127.0.0.1:1 is not an Ebbtide" in read_error(result)["message"]) is (status != 502)


@pytest.mark.parametrize(
    ("words", "present", "absent"),
    [
        (("submit", "job.yaml"), "submit -f job.yaml", "nothing"),
        (("submit", "--name", "x", "--min", "1", "job.yml"), "submit -f job.yml", "nothing"),
        (("submit", "--", "python", "train.py"), "--name and --min", "name:"),
        (("submit", "--name", "x", "--", "python", "train.py"), "--min", "--name"),
        (("ps", "--url", "ftp://x"), "--url: 'ftp://x'", "url: url"),
        (("token", "create", "--name", "a b", "--grant", "admin"), "1 to 63 letters", "pattern"),
        (("audit", "verify", "--digest", "abc"), "64 hexadecimal", "pattern"),
    ],
)
def test_messages_say_what_to_write_instead(
    run: Run, fleet: Any, words: tuple[str, ...], present: str, absent: str
) -> None:
    result = run(words[0], "-o", "json", *words[1:]) if words[0] == "submit" else run(*words, "-o", "json")
    message = read_error(result)["message"]
    assert (result.exit_code, present in message, absent in message) == (ExitCode.USAGE, True, False), message
