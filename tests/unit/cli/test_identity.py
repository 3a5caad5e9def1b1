"""Logging in, contexts, tokens and the audit log from the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import httpx
import pytest

from api.client import Client
from cli.connection import get_config_path, load_contexts, resolve_target
from scheduler.store.schema_migration import migrate
from tests.api.guarded import Guarded
from tests.unit.cli.conftest import AppTransport, Run

URL = "https://ebbtide.example"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Guarded:
    """From here on every command talks to this service, whatever URL it is given. Nothing is in the environment."""
    made = Guarded().with_fleet()
    monkeypatch.setattr("api.client.Client", partial(Client, transport=AppTransport(made.app)))
    for name in ("EBBTIDE_URL", "EBBTIDE_TOKEN", "EBBTIDE_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return made


def log_in(run: Run, token: str, *words: str) -> None:
    result = run("login", "--url", URL, *words, stdin=token + "\n")
    assert result.exit_code == 0, result.output


def test_who_logs_in_is_known_from_then_on(run: Run, guarded: Guarded) -> None:
    log_in(run, guarded.token("anna", "viewer"))
    told = json.loads(run("whoami", "-o", "json", EBBTIDE_URL=None).stdout)
    assert (told["name"], told["grants"]) == ("anna", ["viewer"])
    path = get_config_path()
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_wrong_token_is_not_kept_and_the_remedy_named(run: Run, guarded: Guarded) -> None:
    result = run("login", "--url", URL, stdin="ebk_wrong\n")
    assert result.exit_code == 1
    assert "log in with `ebbtide login`" in result.stderr
    assert load_contexts().targets == {}


def test_without_a_token_one_is_told_how_to_get_in(run: Run, guarded: Guarded) -> None:
    result = run("ps")
    assert result.exit_code == 1
    assert "this needs a token" in result.stderr
    assert "EBBTIDE_TOKEN" in result.stderr


def test_what_one_may_not_do_names_the_role(run: Run, guarded: Guarded) -> None:
    result = run("lending", "pause", EBBTIDE_TOKEN=guarded.token("anna", "viewer"))
    assert result.exit_code == 1
    assert "this needs the role admin; you are anna with viewer" in result.stderr
    assert "`ebbtide whoami`" in result.stderr


def test_contexts_are_used_listed_and_deleted(run: Run, guarded: Guarded) -> None:
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
    assert "context: got 'prod'; allowed: admin" in refused.stderr


def test_a_token_is_sent_to_its_own_service_alone(run: Run, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(run, guarded.root)
    assert resolve_target("").token == resolve_target(URL + "/").token == guarded.root
    assert resolve_target("https://elsewhere.example").token == ""
    monkeypatch.setenv("EBBTIDE_TOKEN", "ebk_other")
    assert resolve_target(URL).token == resolve_target("https://elsewhere.example").token == "ebk_other"


def test_a_file_that_others_may_read_is_refused(run: Run, guarded: Guarded) -> None:
    log_in(run, guarded.root)
    path = get_config_path()
    assert path is not None
    path.chmod(0o644)
    result = run("ps")
    assert result.exit_code == 2
    assert f"`chmod 600 {path}`" in result.stderr


def test_the_first_token_is_made_straight_in_the_database(run: Run, tmp_path: Path, guarded: Guarded) -> None:
    database = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(database)
    made = run(
        "token", "create", "--name", "root", "--grant", "admin", "--expires", "30d", "-o", "json",
        EBBTIDE_URL=None, EBBTIDE_DATABASE_URL=database,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "Straight in the database" in made.stderr
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
        (["--grant", "amdin"], 'grants.0: got "amdin"; allowed: one of viewer, submitter, queue-admin, admin'),
        (["--grant", "viewer", "--expires", "soon"], "--expires: got 'soon'; allowed: 30m, 12h, 90d"),
    ],
)
def test_a_mistake_in_a_token_names_what_is_allowed(
    run: Run, guarded: Guarded, tmp_path: Path, words: list[str], said: str
) -> None:
    migrate(database := f"sqlite:///{tmp_path / 'state.sqlite'}")
    result = run("token", "create", "--name", "ci", *words, "--database-url", database)
    assert result.exit_code == 2
    assert said in result.stderr


def test_tokens_over_the_api_and_their_audit(run: Run, guarded: Guarded) -> None:
    log_in(run, guarded.root)
    made = json.loads(
        run("token", "create", "--name", "ci", "--grant", "viewer", "-o", "json", EBBTIDE_URL=None).stdout
    )
    assert "ci" in run("token", EBBTIDE_URL=None).stdout
    assert run("token", "revoke", made["id"], EBBTIDE_URL=None).exit_code == 0
    told = json.loads(run("audit", "--subject", made["id"], "-o", "json", EBBTIDE_URL=None).stdout)
    assert [(each["actor"], each["action"]) for each in told] == [("root", "CreateToken"), ("root", "RevokeToken")]
    assert "RevokeToken" in run("audit", EBBTIDE_URL=None).stdout


def test_a_token_that_cannot_be_sent_is_refused_by_the_client() -> None:
    for token in ("a b", "ä", "a\nX-Evil: 1"):
        with pytest.raises(ValueError, match="token: got one with blanks"):
            Client("http://x", token=token, transport=httpx.MockTransport(lambda _: httpx.Response(200)))
