"""The token with which commands find the service of their own user, and the addresses that it is sent to."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.identity.principals import token_digest
from cli import local_service, login_users
from cli.commands.service import _announce
from cli.composition.local_token import prepare_local_login
from cli.connection import resolve_target
from cli.exit_codes import InputError
from cli.local_service import announce_service, find_local_service
from scheduler.settings import Settings
from scheduler.store.api_protocol import AuditEntry, AuditFilter
from scheduler.store.protocol import Page
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore

SECRET = "ebk_local"


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield int(listening.getsockname()[1])


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("EBBTIDE_URL", "EBBTIDE_TOKEN", "EBBTIDE_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "local.token"
    path.touch(mode=0o600)
    path.write_text(f"{SECRET}\n")
    return path


def test_commands_find_the_service_at_its_address_and_as_localhost(token_file: Path, port: int) -> None:
    entry = announce_service(f"http://127.0.0.1:{port}", token_file)
    assert entry is not None
    assert (entry.stat().st_mode & 0o777, entry.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert SECRET not in entry.read_text()
    for url in (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/", f"http://localhost:{port}"):
        target = resolve_target(url)
        assert (target.url, target.token) == (f"http://127.0.0.1:{port}", SECRET)


def test_the_token_is_sent_to_no_other_address(token_file: Path, port: int) -> None:
    announce_service(f"http://127.0.0.1:{port}", token_file)
    for url in (
        f"https://127.0.0.1:{port}", f"http://127.0.0.2:{port}", f"http://[::1]:{port}", f"http://127.0.0.1:{port + 1}",
        f"http://ebbtide.example:{port}", f"http://localhost.example:{port}", f"http://127.0.0.1:{port}/other",
        f"http://user@127.0.0.1:{port}", "http://127.0.0.1", "",
    ):  # fmt: skip
        assert resolve_target(url).token == "", url


def test_the_token_is_not_sent_when_nobody_or_another_user_listens(
    token_file: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the service has ended, another user may listen on its port."""
    announce_service(f"http://127.0.0.1:{port}", token_file)
    with socket.create_server(("127.0.0.1", 0)) as ended:
        old = int(ended.getsockname()[1])
    announce_service(f"http://127.0.0.1:{old}", token_file)
    assert find_local_service(f"http://127.0.0.1:{old}") is None
    assert find_local_service(f"http://127.0.0.1:{port}") is not None
    forged = token_file.with_name("tcp")
    head, *lines = Path("/proc/net/tcp").read_text().splitlines()
    of_another = [" ".join([*fields[:7], "4242", *fields[8:]]) for fields in map(str.split, lines)]
    forged.write_text("\n".join([head, *of_another]))
    monkeypatch.setattr(local_service, "_SOCKET_TABLES", (forged,))
    assert find_local_service(f"http://127.0.0.1:{port}") is None


@pytest.mark.parametrize(("host", "url_host"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")])
def test_a_service_on_all_addresses_is_found(token_file: Path, host: str, url_host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        url = f"http://{url_host}:{listening.getsockname()[1]}"
        announce_service(url, token_file)
        assert resolve_target(url).token == SECRET


def test_a_token_of_the_environment_comes_first(token_file: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    announce_service(f"http://127.0.0.1:{port}", token_file)
    monkeypatch.setenv("EBBTIDE_TOKEN", "ebk_other")
    assert resolve_target(f"http://127.0.0.1:{port}").token == "ebk_other"


def test_a_token_file_that_others_can_read_is_refused(token_file: Path, port: int) -> None:
    announce_service(f"http://127.0.0.1:{port}", token_file)
    token_file.chmod(0o640)
    with pytest.raises(InputError, match=f"chmod 600 {token_file}"):
        resolve_target(f"http://127.0.0.1:{port}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_ignored(token_file: Path, port: int) -> None:
    entry = announce_service(f"http://127.0.0.1:{port}", token_file)
    assert entry is not None
    for path in (entry, token_file):
        os.chown(path, 4242, 4242)
        assert find_local_service(f"http://127.0.0.1:{port}") is None
        os.chown(path, 0, 0)


def test_a_broken_entry_is_ignored(token_file: Path, port: int) -> None:
    entry = announce_service(f"http://127.0.0.1:{port}", token_file)
    assert entry is not None
    for text in ("", "[]", "{", json.dumps({"url": 7, "token_file": str(token_file)})):
        entry.write_text(text)
        assert find_local_service(f"http://127.0.0.1:{port}") is None


def test_serve_keeps_its_token_until_it_is_revoked(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'state.sqlite'}", run_dir=tmp_path / "run")
    migrate(settings.database_url)
    first, second = (prepare_local_login(settings, with_code=False) for _ in range(2))
    assert first == second
    assert (first.token_file.stat().st_mode & 0o777, first.token_file.read_text().strip()) == (0o600, first.token)
    store = SqlStore(settings.database_url)
    token = store.tokens.find_by_digest(token_digest(first.token))
    assert token is not None
    assert token.grants == ("admin",)
    store.tokens.revoke(token.id, 1.0, AuditEntry(1.0, "a", "", "RevokeToken", token.id, None, None, ""))
    assert prepare_local_login(settings, with_code=False).token != first.token
    entries = store.audit_log.list_entries(Page(0, 9), AuditFilter())
    assert [each.entry.action for each in entries] == ["CreateToken", "RevokeToken", "CreateToken"]
    store.close()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_secrets_are_printed_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'state.sqlite'}", run_dir=tmp_path / "run")
    migrate(settings.database_url)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    assert _announce(settings) is not None
    printed = capsys.readouterr().err
    assert ("ebk_" in printed, "/#/login?code=ebl_" in printed) == (is_terminal, is_terminal)
    assert str(tmp_path / "run" / "local.token") in printed


def test_login_users_are_people_with_a_shell_besides_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pwd import struct_passwd

    def user(name: str, uid: int, shell: str) -> struct_passwd:
        return struct_passwd((name, "x", uid, uid, "", f"/home/{name}", shell))

    users = [
        user("root", 0, "/bin/bash"), user("daemon", 2, "/usr/sbin/nologin"), user("postgres", 70, "/bin/bash"),
        user("me", 1500, "/bin/bash"), user("anna", 1501, "/bin/bash"), user("bert", 1502, ""),
        user("ci", 1503, "/bin/false"), user("ftp", 1504, "/usr/bin/unlisted"), user("young", 1999, "/bin/bash"),
        user("sudoer", 1505, "/bin/bash"), user("nobody", 65534, "/bin/bash"),
    ]  # fmt: skip
    (tmp_path / "login.defs").write_text("# UID_MIN 1\nUID_MIN\t\t 1500\nUID_MAX 1900\nSYS_UID_MIN 100\n")
    (tmp_path / "shells").write_text("# shells\n/bin/sh\n/bin/bash\n/bin/false\n")
    monkeypatch.setattr(login_users, "_LOGIN_DEFS", tmp_path / "login.defs")
    monkeypatch.setattr(login_users, "_SHELLS", tmp_path / "shells")
    monkeypatch.setattr("pwd.getpwall", lambda: users)
    monkeypatch.setattr("os.getuid", lambda: 1500)
    monkeypatch.setenv("SUDO_UID", "1505")
    assert login_users.list_other_login_users() == ["anna", "bert"]
