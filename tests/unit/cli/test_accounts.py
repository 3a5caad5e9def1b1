"""`ebbtide accounts` against a service with a database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ebbtide.client import Client
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import AuthenticatedService
from tests.unit.cli.conftest import AppTransport, Run

Accounts = Callable[..., Any]


@pytest.fixture
def accounts(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Accounts]:
    """Run `ebbtide accounts` as an admin and return its JSON."""
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    guarded = AuthenticatedService(store)
    monkeypatch.setattr("ebbtide.client.Client", partial(Client, transport=AppTransport(guarded.app)))

    def ask(*words: str) -> Any:
        result = run(
            "accounts", *words, "-o", "json", EBBTIDE_URL="https://ebbtide.example", EBBTIDE_TOKEN=guarded.root
        )
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    yield ask
    store.close()


def test_an_account_is_created_rotated_disabled_and_deleted(accounts: Accounts, run: Run) -> None:
    created = accounts("create", "ci", "--grant", "submitter:research", "--token-expires", "90d")["token"]
    assert created["secret"].startswith("ebk_")
    assert created["expires_at_s"] - created["created_at_s"] == 90 * 86_400
    rotated = accounts("rotate", "ci", "--overlap", "2h")
    assert rotated["overlap_until_s"] - rotated["token"]["created_at_s"] == 7200.0
    assert accounts("disable", "ci")["disabled_at_s"] is not None
    assert accounts("enable", "ci")["disabled_at_s"] is None
    assert [(each["name"], len(each["tokens"])) for each in accounts("list")] == [("ci", 2)]
    assert accounts("delete", "ci") == {"name": "ci"}
    assert accounts("list") == []


def test_an_overlap_that_is_no_duration_is_refused(run: Run) -> None:
    assert run("accounts", "rotate", "ci", "--overlap", "soon").exit_code == 2
