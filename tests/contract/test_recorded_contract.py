"""The recorded contract still holds: databases, snapshots and every wire format are read and reproduced.

Additions are allowed: a later version may have more fields, routes, metrics and codes. A deliberate change of what is
recorded needs a line in CHANGELOG.md, and a migration if databases change.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.codec import decode, encode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.contract.recorded_difference import find_differences, find_openapi_differences
from tests.contract.recorded_world import ROOT, Replay, codes, openapi_shape, read, resource_definitions, without_prose

STATE_TABLES = ("pools", "nodes", "jobs", "loans", "demand", "forecasts", "queues", "curve_points")


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Replay]:
    replayed = Replay(tmp_path)
    with replayed.http:
        yield replayed
    replayed.store.close()


def test_the_recorded_database_loads_as_the_recorded_snapshot(replay: Replay) -> None:
    assert not find_differences(read("snapshot"), as_json(encode(replay.store.load().snapshot)))


def test_a_snapshot_round_trips() -> None:
    assert not find_differences(read("snapshot"), as_json(encode(decode(Snapshot, read("snapshot")))))


def test_a_store_writes_the_recorded_rows(replay: Replay, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'written.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    lease = store.acquire_lease("test", now_s=0.0, ttl_s=1.0)
    assert lease is not None
    store.commit(Commit(Snapshot(), replace(decode(Snapshot, read("snapshot")), generation=1), lease.epoch))
    store.close()
    for table in STATE_TABLES:
        recorded, written = rows(replay.path, table), rows(tmp_path / "written.sqlite", table)
        assert recorded.keys() == written.keys(), table
        assert not find_differences(recorded, written), table


def test_get_routes_give_the_recorded_documents(replay: Replay) -> None:
    recorded = without_prose(read("rest"))
    assert not find_differences(recorded, as_json(replay.answers()))


def test_metric_families_have_the_recorded_names_types_and_labels() -> None:
    command = [sys.executable, "-m", "tests.contract.recorded_world", "metrics"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not find_differences(read("metrics"), json.loads(printed.stdout))


def test_an_agent_hears_the_recorded_replies(replay: Replay) -> None:
    assert not find_differences(read("agent"), as_json(replay.agent_conversation()))


def test_a_plan_request_gives_the_recorded_plan(replay: Replay) -> None:
    assert not find_differences(read("plan"), as_json(replay.plan()))


def test_openapi_has_the_recorded_shape() -> None:
    assert not find_openapi_differences(read("openapi"), openapi_shape())


def test_custom_resource_definitions_have_the_recorded_shape() -> None:
    assert not find_differences(read("resources"), resource_definitions())


def test_codes_are_the_recorded_ones() -> None:
    assert not find_differences(read("codes"), codes())


def test_a_removal_or_a_change_is_a_difference() -> None:
    recorded = {"a": 1, "names": ["x", "y"], "steps": [1, 2]}
    assert find_differences(recorded, {"a": 2, "names": ["y", "z"], "steps": [1], "more": 3}) == [
        "/a: 1 became 2",
        "/names: 'x' missing",
        "/steps: 2 entries became 1",
    ]
    shape = read("openapi")
    operation = next(iter(shape["operations"]))
    assert find_openapi_differences(shape, {**shape, "operations": {operation: shape["operations"][operation]}})
    schemas = {number: {**schema, "properties": {}} for number, schema in shape["schemas"].items()}
    assert find_openapi_differences(shape, {**shape, "schemas": schemas})


def as_json(document: Any) -> Any:
    return json.loads(json.dumps(document))


def rows(path: Path, table: str) -> dict[tuple[str, ...], Any]:
    """Return the documents of a table of live state by key, tombstones left out."""
    key = ("curve_key", "shape") if table == "curve_points" else ("key",)
    with sqlite3.connect(path) as connection:
        selected = connection.execute(f"SELECT body, {', '.join(key)} FROM {table} WHERE body IS NOT NULL")
        return {tuple(values): json.loads(body) for body, *values in selected}
