"""Put what lists of ended jobs and loans are ordered by and ask for beside the bodies, those of before included."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None

_ROWS_AT_ONCE = 1000
_JOB = ("state", "queue", "owner", "name")
_LOAN = ("state", "pool", "node")


def upgrade() -> None:
    for table, at_s, texts in (("ended_jobs", "submitted_at_s", _JOB), ("ended_loans", "offered_at_s", _LOAN)):
        op.add_column(table, sa.Column(at_s, sa.Double, nullable=False, server_default="0"))
        for name in texts:
            op.add_column(table, sa.Column(name, sa.String, nullable=False, server_default=""))
        _fill(table, at_s, texts)
        if op.get_bind().dialect.name == "postgresql":
            op.alter_column(table, "id", type_=sa.String(collation="C"))  # the order of Python, and of SQLite
        op.create_index(f"ix_{table}_list", table, [at_s, "id", *texts])


def downgrade() -> None:
    for table, names in (("ended_jobs", ("submitted_at_s", *_JOB)), ("ended_loans", ("offered_at_s", *_LOAN))):
        op.drop_index(f"ix_{table}_list", table)
        for name in names:
            op.drop_column(table, name)


def _fill(table: str, at_s: str, texts: tuple[str, ...]) -> None:
    columns = [sa.column("number", sa.Integer), sa.column("body", sa.JSON), sa.column(at_s, sa.Double)]
    rows = sa.table(table, *columns, *(sa.column(name, sa.String) for name in texts))
    connection, last = op.get_bind(), 0
    change = sa.update(rows).where(rows.c.number == sa.bindparam("of"))
    change = change.values({name: sa.bindparam(f"new_{name}") for name in (at_s, *texts)})
    while True:
        following = sa.select(rows.c.number, rows.c.body).where(rows.c.number > last)
        found = connection.execute(following.order_by(rows.c.number).limit(_ROWS_AT_ONCE)).all()
        if not found:
            return
        connection.execute(change, [{"of": row.number, **_values(row.body, (at_s, *texts))} for row in found])
        last = found[-1].number


def _values(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """A job's queue and name are in its spec; jobs of before had no owner."""
    known = {"owner": "", **body.get("spec", {}), **body}
    return {f"new_{name}": known[name] for name in names}
