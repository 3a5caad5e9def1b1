"""Login, contexts, tokens and the audit log."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.connection import get_config_path, load_contexts, resolve_target
from cli.exit_codes import ExitCode
from ebbtide.client import Client
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.schema_migration import migrate
from tests.api.authenticated_service import AuthenticatedService
from tests.unit.cli.conftest import AppTransport, Run

URL = "https://ebbtide.example"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AuthenticatedService:
    """A service with authentication. Every command talks to it, with no EBBTIDE_ variables set."""
    made = AuthenticatedService().with_fleet()
    monkeypatch.setattr("ebbtide.client.Client", partial(Client, transport=AppTransport(made.app)))
    for name in ("EBBTIDE_URL", "EBBTIDE_TOKEN", "EBBTIDE_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return made


def log_in(run: Run, token: str, *words: str) -> None:
    result = run("login", "--url", URL, *words, stdin=token + "\n")
    assert result.exit_code == 0, result.output


def test_login_saves_the_token(run: Run, guarded: AuthenticatedService) -> None:
    log_in(run, guarded.token("anna", "viewer"))
    document = json.loads(run("whoami", "-o", "json", EBBTIDE_URL=None).stdout)
    assert (document["name"], document["grants"]) == ("anna", ["viewer"])
    path = get_config_path()
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600


def test_rejected_token_is_not_saved(run: Run, guarded: AuthenticatedService) -> None:
    result = run("login", "--url", URL, stdin="ebk_wrong\n")
    assert result.exit_code == ExitCode.UNAUTHENTICATED
    assert "log in with `ebbtide login`" in result.stderr
    assert load_contexts().targets == {}


def test_request_without_a_token_names_the_remedy(run: Run, guarded: AuthenticatedService) -> None:
    result = run("ps")
    assert result.exit_code == ExitCode.UNAUTHENTICATED
    assert "EBBTIDE_TOKEN" in result.stderr


def test_forbidden_request_names_the_role(run: Run, guarded: AuthenticatedService) -> None:
    result = run("lending", "pause", EBBTIDE_TOKEN=guarded.token("anna", "viewer"))
    assert result.exit_code == ExitCode.REFUSED
    assert "role admin" in result.stderr
    assert "`ebbtide whoami`" in result.stderr


def test_console_prints_a_url_that_signs_in_once(run: Run, guarded: AuthenticatedService) -> None:
    log_in(run, guarded.token("anna", "viewer"))
    document = json.loads(run("console", "-o", "json", EBBTIDE_URL=None).stdout)
    page, _, code = document["url"].partition("/#/login?code=")
    assert page == URL
    assert guarded.http.post("/sign-in", json={"code": code}).json()["name"] == "anna"
    assert guarded.http.post("/sign-in", json={"code": code}).status_code == 401
    assert "/#/login?code=ebl_" in run("console", EBBTIDE_URL=None).stdout


def test_contexts_are_used_listed_and_deleted(run: Run, guarded: AuthenticatedService) -> None:
    log_in(run, guarded.token("anna", "viewer"), "--context", "prod")
    log_in(run, guarded.root, "--context", "admin")
    assert json.loads(run("context", "-o", "json").stdout) == [
        {"name": "admin", "url": URL, "current": True}, {"name": "prod", "url": URL, "current": False},
    ]  # fmt: skip
    assert guarded.root not in run("context").output
    run("context", "use", "prod")
    assert json.loads(run("whoami", "-o", "json", EBBTIDE_URL=None).stdout)["name"] == "anna"
    chosen = run("whoami", "-o", "json", EBBTIDE_URL=None, EBBTIDE_CONTEXT="admin")
    assert json.loads(chosen.stdout)["name"] == "root"
    assert run("context", "delete", "prod").exit_code == 0
    refused = run("context", "use", "prod")
    assert refused.exit_code == 2
    assert "context: got 'prod'" in refused.stderr


def test_token_is_sent_to_its_own_service_only(
    run: Run, guarded: AuthenticatedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(run, guarded.root)
    assert resolve_target("").token == resolve_target(URL + "/").token == guarded.root
    assert resolve_target("https://elsewhere.example").token == ""
    monkeypatch.setenv("EBBTIDE_TOKEN", "ebk_other")
    assert resolve_target(URL).token == resolve_target("https://elsewhere.example").token == "ebk_other"


def test_readable_configuration_file_is_rejected(run: Run, guarded: AuthenticatedService) -> None:
    log_in(run, guarded.root)
    path = get_config_path()
    assert path is not None
    path.chmod(0o644)
    result = run("ps")
    assert result.exit_code == 2
    assert f"`chmod 600 {path}`" in result.stderr


def test_first_token_is_created_in_the_database(run: Run, tmp_path: Path, guarded: AuthenticatedService) -> None:
    database = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(database)
    made = run(
        "token", "create", "--name", "root", "--grant", "admin", "--expires", "30d", "-o", "json",
        EBBTIDE_URL=None, EBBTIDE_DATABASE_URL=database,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "state.sqlite" in made.stderr
    token = json.loads(made.stdout)
    assert token["secret"].startswith("ebk_")
    assert token["expires_at_s"] - token["created_at_s"] == 30 * 86_400
    here = ("--database-url", database, "-o", "json")
    assert json.loads(run("token", "revoke", token["id"], *here).stdout)["revoked_at_s"] is not None
    listed = json.loads(run("token", "list", *here).stdout)
    assert [each["id"] for each in listed] == [token["id"]]
    assert "secret" not in listed[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grant", "amdin"], 'grants.0: got "amdin"'),
        (["--grant", "viewer", "--expires", "soon"], "--expires: 'soon'"),
    ],
)
def test_invalid_token_option_is_named(
    run: Run, guarded: AuthenticatedService, tmp_path: Path, words: list[str], said: str
) -> None:
    migrate(database := f"sqlite:///{tmp_path / 'state.sqlite'}")
    result = run("token", "create", "--name", "ci", *words, "--database-url", database)
    assert result.exit_code == 2
    assert said in result.stderr


def test_tokens_are_managed_over_the_api_and_audited(run: Run, guarded: AuthenticatedService) -> None:
    log_in(run, guarded.root)
    made = json.loads(
        run("token", "create", "--name", "ci", "--grant", "viewer", "-o", "json", EBBTIDE_URL=None).stdout
    )
    assert "ci" in run("token", EBBTIDE_URL=None).stdout
    assert run("token", "revoke", made["id"], EBBTIDE_URL=None).exit_code == 0
    document = json.loads(run("audit", "--subject", made["id"], "-o", "json", EBBTIDE_URL=None).stdout)
    assert [(each["actor"], each["action"]) for each in document] == [("root", "CreateToken"), ("root", "RevokeToken")]
    assert "RevokeToken" in run("audit", EBBTIDE_URL=None).stdout
    last = json.loads(run("audit", "-n", "2", "-o", "json", EBBTIDE_URL=None).stdout)
    assert [each["action"] for each in last] == ["CreateToken", "RevokeToken"]
    by_root = ("audit", "--actor-id", last[0]["actor_id"], "-o", "json")
    assert len(json.loads(run(*by_root, EBBTIDE_URL=None).stdout)) > len(last)
    assert json.loads(run("audit", "--actor-id", "token:nobody", "-o", "json", EBBTIDE_URL=None).stdout) == []


def test_the_audit_command_reads_no_more_entries_than_it_shows(
    run: Run, guarded: AuthenticatedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(run, guarded.root)
    entry = AuditEntry(1.0, "root", "", "PauseLending", "fleet", None, None, "")
    for number in range(30):
        guarded.store.audit_log.append(replace(entry, request_id=str(number)))
    read: list[int] = []
    list_newest = guarded.store.audit_log.list_newest

    def count_read(*request: Any, **filters: Any) -> Any:
        rows = list_newest(*request, **filters)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(guarded.store.audit_log, "list_newest", count_read)
    shown = json.loads(run("audit", "-n", "3", "-o", "json", EBBTIDE_URL=None).stdout)
    assert ([each["request_id"] for each in shown], read) == (["27", "28", "29"], [4])


def test_client_rejects_a_token_that_is_not_a_header_value() -> None:
    for token in ("a b", "ä", "a\nX-Evil: 1"):
        with pytest.raises(ValueError, match=r"^token"):
            Client("http://x", token=token, transport=httpx.MockTransport(lambda _: httpx.Response(200)))
