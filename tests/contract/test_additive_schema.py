"""Old and new programs share a database during an upgrade: migrations only add, and unknown fields are ignored."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select, text, update

from scheduler.domain.commands import Command, RecallAll
from scheduler.domain.events import Event, EventCode
from scheduler.domain.job_queue import UsageEntry, UsageKey
from scheduler.scheduling.usage import sum_usage
from scheduler.store.database import open_engine
from scheduler.store.protocol import Commit, Page
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_history import EVENTS
from scheduler.store.sql_inbox import INBOX
from scheduler.store.sql_state import JOBS
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job
from tests.contract.schema_shape import RECORDED, find_contractions, read_shape

RECORDED_SCHEMAS = sorted(RECORDED.glob("schema-*.json"))


@pytest.mark.filterwarnings("ignore:.*expression-based index")  # no older program uses one, and SQLAlchemy skips it
@pytest.mark.parametrize("recorded", RECORDED_SCHEMAS, ids=lambda path: path.stem)
def test_schema_holds_everything_that_an_older_program_uses(recorded: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'newest.sqlite'}"
    migrate(url)
    engine = open_engine(url)
    contractions = list(find_contractions(json.loads(recorded.read_text(encoding="utf-8")), read_shape(engine)))
    engine.dispose()
    assert not contractions, "see decision 23: expand first, contract one release later"


def test_contractions_are_found() -> None:
    shape = json.loads(RECORDED_SCHEMAS[0].read_text(encoding="utf-8"))
    narrowed = deepcopy(shape)
    del narrowed["jobs"]["columns"]["body"]
    del narrowed["usage"]
    narrowed["nodes"]["columns"]["generation"]["nullable"] = True
    narrowed["pools"]["columns"]["zone"] = {"type": "VARCHAR", "nullable": False, "has_default": False}
    narrowed["machines"]["unique"] = []
    found = [text.partition(":")[0] for text in find_contractions(shape, narrowed)]
    assert sorted(found) == ["jobs.body", "machines", "nodes.generation", "pools.zone", "usage"]
    narrowed = deepcopy(shape)
    narrowed["pools"]["columns"]["zone"] = {"type": "VARCHAR", "nullable": True, "has_default": False}
    assert not list(find_contractions(shape, narrowed))


def test_usage_of_an_older_program_is_counted_for_the_owner_whom_it_named(database_url: str) -> None:
    engine = open_engine(database_url)
    older = text(
        "INSERT INTO usage (hour_s, queue, owner, gpu, is_lent, gpu_s, lost_gpu_s) "
        "VALUES (3600, 'q', :owner, 'cpu', :is_lent, 1, 0) "
        "ON CONFLICT (hour_s, queue, owner, gpu, is_lent) DO UPDATE SET gpu_s = usage.gpu_s + excluded.gpu_s"
    )
    with engine.begin() as connection:
        for owner in ("ada", "ada", "anybody", ""):
            connection.execute(older, {"owner": owner, "is_lent": False})
    engine.dispose()
    store = SqlStore(database_url)
    before = store.load().snapshot
    key = UsageKey(3600, "q", "name:ada", "cpu", False)
    newer = (UsageEntry(key, 4.0, owner="ada"), UsageEntry(replace(key, owner_id="token:1"), 8.0, owner="ada"))
    store.commit(Commit(before, replace(before, generation=1), epoch=0, usage=newer))
    sums = sum_usage(store.load_usage(from_s=0.0, to_s=9000.0).entries)
    store.close()
    assert [(entry.key.owner_id, entry.owner, entry.gpu_s) for entry in sums] == [
        ("", "", 1.0), ("local", "anybody", 1.0), ("name:ada", "ada", 6.0), ("token:1", "ada", 8.0),
    ]  # fmt: skip


def test_rows_of_a_later_version_are_read(database_url: str) -> None:
    store = SqlStore(database_url)
    before = store.load().snapshot
    event = Event(1.0, EventCode.JOB_STATE, "a", "submitted")
    store.commit(Commit(before, replace(before, generation=1, jobs={"a": a_job("a")}), epoch=0, events=(event,)))
    known, unknown = Command("known", 1.0, RecallAll()), Command("unknown", 1.0, RecallAll())
    for each in (known, unknown):
        store.send(each)
    store.close()
    engine = open_engine(database_url)
    with engine.begin() as connection:
        job = connection.execute(select(JOBS.c.body)).scalar_one()
        connection.execute(update(JOBS).values(body={**job, "colour": "red", "spec": {**job["spec"], "tier": 2}}))
        body = connection.execute(select(EVENTS.c.body)).scalar_one()
        connection.execute(update(EVENTS).values(body={**body, "colour": "red"}))
        row = connection.execute(select(INBOX.c.body).where(INBOX.c.id == "unknown")).scalar_one()
        later = {**row, "body": {"kind": "PaintNode", "colour": "red"}}
        connection.execute(update(INBOX).where(INBOX.c.id == "unknown").values(body=later))
    engine.dispose()
    store = SqlStore(database_url)
    loaded = store.load()
    assert (loaded.snapshot.jobs, loaded.inbox) == ({"a": a_job("a")}, (known,))
    assert [record.event for record in store.list_events(Page())] == [event]
    third = Command("third", 1.0, RecallAll())
    store.send(third)
    assert store.load().inbox == (known, third)
    consumed = Commit(loaded.snapshot, replace(loaded.snapshot, generation=2), epoch=0, consumed_command_ids=("known",))
    store.commit(consumed)
    assert (store.load().inbox, store.count_pending_commands()) == ((third,), 2)
    store.close()
