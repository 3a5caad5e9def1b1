"""`ebbtide doctor`, one fault at a time in a sound installation, and `backup`, `restore` and `reset-clock`."""

from __future__ import annotations

import json
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import Result

from api.queue_secrets.vault import SecretVault
from cli.doctor.database_checks import (
    check_clock,
    check_database,
    check_master_keys,
    check_sqlite_file,
    find_file_system,
)
from cli.doctor.local_checks import CheckState, check_files, check_ports, check_variables
from scheduler.settings import Settings
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.database import open_engine
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sealed_secrets import SealedSecret
from scheduler.store.sql_store import SqlStore
from scheduler.store.sqlite_lock import hold_api_lock
from scheduler.token_secret import load_token_secret

Run = Callable[..., Result]


class Installation:
    """A migrated database and a run directory with a token secret."""

    def __init__(self, folder: Path) -> None:
        self.database, self.run_dir = folder / "state.sqlite", folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.settings = Settings(database_url=f"sqlite:///{self.database}", run_dir=self.run_dir, port=0)
        migrate(self.settings.database_url)
        self.database.chmod(0o600)
        load_token_secret(self.settings.token_secret_path)
        self.variables = {
            "EBBTIDE_DATABASE_URL": self.settings.database_url,
            "EBBTIDE_RUN_DIR": str(self.run_dir),
            "EBBTIDE_PORT": "0",
        }

    def commit_at(self, now_s: float) -> None:
        store = SqlStore(self.settings.database_url)
        before = store.load().snapshot
        store.commit(Commit(before, replace(before, generation=before.generation + 1, now_s=now_s), epoch=0))
        store.close()


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def find_failed(checks: Any) -> list[tuple[str, str]]:
    return [(each.name, each.remedy) for each in checks if each.state is CheckState.FAILURE]


def test_sound_installation_passes(run: Run, installation: Installation) -> None:
    result = run("doctor", "-o", "json", **installation.variables)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"]) == (0, True), document
    names = {check["name"] for check in document["checks"]}
    assert {"settings", "policy", "run directory", "token secret", "database", "database file", "clock"} <= names
    assert "containment" in names
    assert {check["state"] for check in document["checks"]} <= {"ok", "warning"}


def test_misspelt_and_invalid_settings_fail(run: Run, installation: Installation) -> None:
    result = run("doctor", "-o", "json", EBBTIDE_TYPO="1", EBBTIDE_LEASE="5", **installation.variables)
    failures = [each for each in json.loads(result.stdout)["checks"] if each["state"] == "failure"]
    assert result.exit_code == 1
    assert [each["remedy"] for each in failures] == [
        "correct or remove EBBTIDE_LEASE",
        "correct or remove EBBTIDE_TYPO",
    ]
    assert "'EBBTIDE_LEASE_S'" in failures[0]["message"]
    assert "did you mean" not in failures[1]["message"]
    assert "EBBTIDE_TYPO" in run("doctor", EBBTIDE_TYPO="1", **installation.variables).stdout


def test_invalid_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_LEASE_S", "soon")
    [check] = check_variables({"EBBTIDE_LEASE_S": "soon", "EBBTIDE_AGENT_LEAVE_WITHIN": "20s", "EBBTIDE_TOKEN": "x"})
    assert (check.state, check.remedy) == (CheckState.FAILURE, "correct EBBTIDE_LEASE_S")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EBBTIDE_OIDC_GROUPS", "foo"),
        ("EBBTIDE_OIDC_GROUPS", '{"a": ["root"]}'),
        ("EBBTIDE_RECONFIGURATION_S_BY_MODEL", "{gpt2:1}"),
    ],
)
def test_malformed_json_of_a_setting_is_an_error_that_names_it(
    run: Run, installation: Installation, name: str, value: str
) -> None:
    variables = {**installation.variables, name: value}
    checks = json.loads(run("doctor", "-o", "json", **variables).stdout)["checks"]
    assert [each["remedy"] for each in checks] == [f"correct {name}"]
    result = run("migrate", "-o", "json", **variables)
    error = json.loads(result.stderr)["error"]
    assert (result.exit_code, error["message"].partition(":")[0]) == (2, name)


def test_authentication_that_serve_refuses_to_leave_off_fails(
    run: Run, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = list[str]()
    monkeypatch.setattr("cli.login_users.list_other_login_users", lambda: others)
    states = []
    for host, names in (("0.0.0.0", []), ("127.0.0.1", ["bert"]), ("127.0.0.1", [])):
        others[:] = names
        result = run("doctor", "-o", "json", EBBTIDE_AUTH="off", EBBTIDE_HOST=host, **installation.variables)
        [check] = [each for each in json.loads(result.stdout)["checks"] if each["name"] == "authentication"]
        states.append((check["state"], result.exit_code))
    assert states == [("failure", 1), ("failure", 1), ("warning", 0)]


def test_files_that_others_can_read_or_write_fail(installation: Installation) -> None:
    assert not find_failed(check_files(installation.settings))
    secret = installation.settings.token_secret_path
    secret.chmod(0o640)
    installation.run_dir.chmod(0o777)
    installation.database.chmod(0o644)
    assert find_failed(check_files(installation.settings)) == [
        ("run directory", f"chmod go-w {installation.run_dir}"),
        ("token secret", f"chmod 0600 {secret}"),
    ]
    assert ("database file", f"chmod 0600 {installation.database}") in find_failed(
        check_database(installation.settings)
    )
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    installation.run_dir.chmod(0o700)
    assert [name for name, _ in find_failed(check_files(installation.settings))] == ["token secret"]


@pytest.mark.parametrize(("revision", "state"), [("0001", CheckState.FAILURE), ("9999", CheckState.WARNING)])
def test_database_of_another_version_is_reported(installation: Installation, revision: str, state: CheckState) -> None:
    engine = open_engine(installation.settings.database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    engine.dispose()
    [check] = [each for each in check_database(installation.settings) if each.name == "database"]
    assert check.state is state


def test_unreachable_database_fails() -> None:
    settings = Settings(database_url="postgresql+psycopg://127.0.0.1:1/ebbtide?connect_timeout=1")
    assert [check.state for check in check_database(settings)] == [CheckState.FAILURE]
    assert list(check_clock(settings)) == []


def test_sqlite_with_several_api_processes_or_on_a_network_fails(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = installation.database
    assert find_failed(check_sqlite_file(path, api_processes=2))[0][0] == "database file"
    assert find_file_system(path)
    monkeypatch.setattr("cli.doctor.database_checks.find_file_system", lambda _path: "nfs4")
    checks = list(check_sqlite_file(path, api_processes=1))
    assert next((check.state, "nfs4" in check.message) for check in checks) == (CheckState.FAILURE, True)


def test_times_in_the_future_fail_and_can_be_reset(run: Run, installation: Installation) -> None:
    installation.commit_at(time.time() + 86_400.0)
    assert [name for name, _ in find_failed(check_clock(installation.settings))] == ["clock"]
    result = run("reset-clock", "-o", "json", **installation.variables)
    document = json.loads(result.stdout)
    assert document["rows"] == {"state": 1}
    assert document["moved_back_s"] == pytest.approx(86_400.0, abs=60.0)
    assert not find_failed(check_clock(installation.settings))
    assert json.loads(run("reset-clock", "-o", "json", **installation.variables).stdout)["rows"] == {}


def test_port_of_another_program_fails_and_that_of_ebbtide_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(port=taken.getsockname()[1])
        states: list[list[CheckState]] = []
        for known in (set[str](), {f"http://127.0.0.1:{settings.port}/healthz"}):
            states.append([check.state for check in check_ports(settings, known.__contains__)])
    assert states == [[CheckState.FAILURE], [CheckState.OK]]
    assert [check.state for check in check_ports(settings, lambda _url: False)] == [CheckState.OK]


def test_backup_and_restore_bring_back_database_and_secret(
    run: Run, installation: Installation, tmp_path: Path
) -> None:
    installation.commit_at(5.0)
    secret, file = installation.settings.token_secret_path, tmp_path / "backup"
    content = secret.read_bytes()
    result = run("backup", str(file), "-o", "json", **installation.variables)
    assert json.loads(result.stdout)["secrets"] == ["EBBTIDE_TOKEN_SECRET_FILE"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("backup", str(file), **installation.variables).exit_code == 2
    refused = run("restore", str(file), **installation.variables)
    assert (refused.exit_code, "--force" in refused.stderr) == (3, True)
    secret.write_bytes(b"x" * 32)
    refused = run("restore", str(file), **installation.variables)
    assert (refused.exit_code, str(secret) in refused.stderr) == (3, True)
    secret.unlink()
    installation.database.unlink()
    result = run("restore", str(file), "-o", "json", **installation.variables)
    assert result.exit_code == 0, result.output
    assert (secret.read_bytes(), stat.S_IMODE(secret.stat().st_mode)) == (content, 0o600)
    assert stat.S_IMODE(installation.database.stat().st_mode) == 0o600
    assert run("restore", str(tmp_path / "none"), **installation.variables).exit_code == 2


def test_secrets_without_their_master_key_are_reported(run: Run, installation: Installation, tmp_path: Path) -> None:
    key_file, file = installation.settings.secrets_key_path, tmp_path / "backup"
    vault, store = SecretVault(key_file, creates=True), SqlStore(installation.settings.database_url)
    new = SealedSecret("default", "token", 1, "", "", "", 1.0, 1.0, "ada")
    store.secrets.put(vault.seal(new, b"hf_abcdefgh"), AuditEntry(1.0, "ada", "", "SetSecret", "token", None, None, ""))
    store.close()
    made = json.loads(run("backup", str(file), "-o", "json", **installation.variables).stdout)
    assert (made["master_keys"], made["master_key_file"]) == ([vault.read_keys().current], str(key_file))
    table = run("backup", str(tmp_path / "b2"), **installation.variables).stdout
    assert str(key_file) in "".join(table.split()), "a long path is folded at the width of the table"
    assert not find_failed(check_master_keys(installation.settings))
    key_file.unlink()
    installation.database.unlink()
    restored = json.loads(run("restore", str(file), "-o", "json", **installation.variables).stdout)
    assert made["master_keys"][0] in restored["unusable_secrets"]
    assert [name for name, _ in find_failed(check_master_keys(installation.settings))] == ["secrets"]
    assert run("doctor", **installation.variables).exit_code == 1
    assert (run("secrets", "rotate-key", **installation.variables).exit_code, key_file.exists()) == (3, False)


def test_restore_and_clock_reset_need_a_stopped_service(run: Run, installation: Installation, tmp_path: Path) -> None:
    url, file = installation.settings.database_url, tmp_path / "backup"
    assert run("backup", str(file), **installation.variables).exit_code == 0
    repairs = (("restore", str(file), "--force"), ("reset-clock",))
    with hold_api_lock(url):
        assert [run(*words, **installation.variables).exit_code for words in repairs] == [3, 3]
    store = SqlStore(url)
    lease = store.acquire_lease("leader", now_s=time.time(), ttl_s=60.0)
    assert lease is not None
    assert [run(*words, **installation.variables).exit_code for words in repairs] == [3, 3]
    store.release_lease("leader")
    store.close()
    assert [run(*words, **installation.variables).exit_code for words in repairs] == [0, 0]


def test_unreachable_database_has_the_exit_code_of_an_unavailable_service(run: Run, tmp_path: Path) -> None:
    file, sound = tmp_path / "backup", f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(sound)
    assert run("backup", str(file), EBBTIDE_DATABASE_URL=sound).exit_code == 0
    url = "postgresql+psycopg://127.0.0.1:1/ebbtide?connect_timeout=1"
    for words in (
        ("migrate",),
        ("backup", str(tmp_path / "b2")),
        ("restore", str(file)),
        ("reset-clock",),
        ("token", "create", "--name", "t", "--grant", "admin"),
        ("secrets", "rotate-key"),
    ):
        given = ("--database-url", url) if words[0] == "token" else ()
        result = run(*words, *given, "-o", "json", EBBTIDE_DATABASE_URL=url, EBBTIDE_RUN_DIR=str(tmp_path))
        assert result.exit_code == 6, (words, result.output)


def test_backup_can_leave_secrets_out(run: Run, installation: Installation, tmp_path: Path) -> None:
    result = run("backup", str(tmp_path / "b"), "--without-secrets", "-o", "json", **installation.variables)
    assert json.loads(result.stdout)["secrets"] == []
