"""Run by Alembic: the connection is handed in by `scheduler.store.schema_migration`."""

from __future__ import annotations

from alembic import context

from scheduler.store.tables import METADATA

connection = context.config.attributes.get("connection")
assert connection is not None, "migrations run through `ebbtide migrate`, which hands the connection in"
# Batch mode lets a later revision change a column where the database itself cannot alter tables.
context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
