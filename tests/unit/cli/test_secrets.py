"""`ebbtide secrets`: where values come from, and the rotation of the master key."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.queue_secrets.vault import SecretVault
from cli.commands import queue_secrets
from scheduler.store.api_protocol import AuditEntry, AuditFilter
from scheduler.store.protocol import Page
from scheduler.store.schema_migration import migrate
from scheduler.store.sealed_secrets import SealedSecret
from scheduler.store.sql_store import SqlStore

ENTRY = AuditEntry(1.0, "ada", "", "SetSecret", "a", None, None, "")


def test_values_are_no_arguments(tmp_path: Path) -> None:
    refused = CliRunner().invoke(queue_secrets.app, ["set", "hf-token", "hf_abcdefgh"])
    assert refused.exit_code == 2
    file = tmp_path / "value"
    file.write_bytes(b"line\n")
    assert queue_secrets._read_value(str(file)) == b"line\n"


def test_rotation_encrypts_all_data_keys_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, path = f"sqlite:///{tmp_path / 'state.sqlite'}", tmp_path / "secrets.key"
    migrate(url)
    monkeypatch.setenv("EBBTIDE_DATABASE_URL", url)
    monkeypatch.setenv("EBBTIDE_SECRETS_KEY_FILE", str(path))
    monkeypatch.setattr(queue_secrets, "_SETTLE_S", 0.0)
    store, vault = SqlStore(url), SecretVault(path, creates=True)
    for name in ("a", "b"):
        new = SealedSecret("default", name, 1, "", "", "", 1.0, 1.0, "ada")
        store.secrets.put(vault.seal(new, name.encode() * 8), ENTRY)
    old = vault.read_keys().current
    done = CliRunner().invoke(queue_secrets.app, ["rotate-key"])
    assert done.exit_code == 0, done.output
    ring = vault.read_keys()
    assert list(ring.keys) == [ring.current] != [old]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [vault.open(each) for each in store.secrets.list_secrets("")] == [b"aaaaaaaa", b"bbbbbbbb"]
    actions = [each.entry.action for each in store.audit_log.list_entries(Page(), AuditFilter())]
    assert actions == ["SetSecret", "SetSecret", "RotateSecretsKey"]
    store.close()
