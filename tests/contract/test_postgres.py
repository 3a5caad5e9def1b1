"""SqlStore on PostgreSQL: restarts of the server and row numbers beyond 32 bits."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from api.app import create_app
from scheduler.domain.commands import Command, RecallAll
from scheduler.runtime.clock import ManualClock
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.store.database import StoreError
from scheduler.store.protocol import Page, UnavailableError
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import AppTransport
from tests.postgres_server import PostgresServer

COMMAND = Command("c", 1.0, RecallAll())


def test_store_recovers_after_a_restart_of_the_server(disposable_postgres: PostgresServer) -> None:
    url = disposable_postgres.new_database()
    store, refused = SqlStore(url), []
    assert store.send(COMMAND)
    disposable_postgres.kill()
    for ask in (
        store.load,
        store.count_pending_commands,
        store.get_lease,
        lambda: store.send(COMMAND),
        lambda: store.list_events(Page()),
    ):
        with pytest.raises(UnavailableError) as caught:
            ask()
        refused.append(str(caught.value))
    assert all("connection" in each for each in refused), refused
    disposable_postgres.start()
    assert store.load().inbox == (COMMAND,)
    assert not store.send(COMMAND), "it had been taken"
    store.close()


def test_inbox_numbers_exceed_32_bits(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("SELECT setval('inbox_number_seq', 2147483646)"))
    store = SqlStore(url)
    sent = tuple(replace(COMMAND, id=name) for name in "xyz")
    assert all(store.send(command) for command in sent)
    assert store.load().inbox == sent
    assert store.send(COMMAND)
    assert store.load().inbox == (*sent, COMMAND), "those after the last one known"
    store.close()


def test_error_names_an_unreachable_server(disposable_postgres: PostgresServer) -> None:
    url = disposable_postgres.new_database()
    disposable_postgres.kill()
    with pytest.raises(StoreError, match=r"postgresql\+psycopg://postgres@/test_"):
        SqlStore(url)


def test_api_reports_an_unavailable_database(disposable_postgres: PostgresServer) -> None:
    store = SqlStore(disposable_postgres.new_database())
    settings = Settings(auth="off", allowed_hosts="service")
    app = create_app(
        store,
        settings,
        clock=ManualClock(1_760_000_000.0),
        policies=load_policy_set(settings.policy),
        lease=store.get_lease,
        token_secret=b"a secret that only tests know....",
        run_log=store.run_log,
    )
    http = httpx.Client(transport=AppTransport(app), base_url="http://service")
    assert http.get("/v1/jobs").status_code == 200
    disposable_postgres.kill()
    for path in ("/v1/jobs", "/readyz", "/metrics"):
        answer = http.get(path)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert answer.json()["type"] == "urn:ebbtide:problem:store-unavailable"
    assert http.get("/healthz").status_code == 200, "it would not help to start this process anew"
    disposable_postgres.start()
    assert http.get("/v1/jobs").status_code == 200
    store.close()
