"""The shape of a database's schema, and what an older program could not bear in a newer one.

`python -m tests.contract.schema_shape REVISION` records the schema of a released revision.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alembic import command
from sqlalchemy import Engine, inspect

from scheduler.store.database import open_engine
from scheduler.store.schema_migration import build_alembic_config

RECORDED = Path(__file__).parent / "recorded"
Shape = dict[str, Any]


def read_shape(engine: Engine) -> Shape:
    """Return columns, primary key and unique indexes of each table."""
    inspector, shape = inspect(engine), Shape()
    for table in sorted(inspector.get_table_names()):
        columns = {
            column["name"]: {
                "type": str(column["type"]),
                "nullable": column["nullable"],
                "has_default": column["default"] is not None,
            }
            for column in inspector.get_columns(table)
        }
        unique = [sorted(map(str, index["column_names"])) for index in inspector.get_indexes(table) if index["unique"]]
        key = inspector.get_pk_constraint(table)["constrained_columns"]
        shape[table] = {"columns": columns, "key": key, "unique": sorted(unique)}
    return shape


def find_contractions(older: Shape, newer: Shape) -> Iterator[str]:
    """Yield what a program of the older schema cannot work with in the newer one."""
    for table, before in older.items():
        after = newer.get(table)
        if after is None:
            yield f"{table}: removed"
            continue
        for name, column in before["columns"].items():
            found = after["columns"].get(name)
            if found is None:
                yield f"{table}.{name}: removed or renamed"
            elif (found["type"], found["nullable"]) != (column["type"], column["nullable"]):
                yield f"{table}.{name}: changed"
        for name, column in after["columns"].items():
            if name not in before["columns"] and not (column["nullable"] or column["has_default"]):
                yield f"{table}.{name}: new, but an older program cannot insert rows without it"
        if before["key"] != after["key"] or before["unique"] != after["unique"]:
            yield f"{table}: other keys or unique indexes"


def record(revision: str) -> None:
    """Write the shape of a revision to the recorded contracts."""
    with TemporaryDirectory() as folder:
        engine, config = open_engine(f"sqlite:///{folder}/schema.sqlite"), build_alembic_config()
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
        shape = read_shape(engine)
        engine.dispose()
    shape.pop("alembic_version")
    path = RECORDED / f"schema-{revision}.json"
    path.write_text(json.dumps(shape, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
