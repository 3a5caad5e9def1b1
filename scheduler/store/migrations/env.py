"""Run by Alembic with the connection that `scheduler.store.schema_migration.migrate` passes."""

from __future__ import annotations

from alembic import context

import scheduler.store.sql_store  # noqa: F401  (defines every table of METADATA)
from scheduler.store.database import METADATA

connection = context.config.attributes.get("connection")
assert connection is not None, "run migrations with `ebbtide migrate`, which passes the connection"
# Batch mode lets a revision change columns in SQLite, which cannot alter them in place.
context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
