"""Let the numbers of rows go beyond 2^31 on PostgreSQL, which 200 commands a second reach in four months: from then on
it would have taken none. In SQLite they always could.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision: str | None = "0011"
branch_labels: str | None = None
depends_on: str | None = None

_TABLES = ("inbox", "events", "decisions", "ended_jobs", "ended_loans", "readings", "webhook_deliveries")


def upgrade() -> None:
    _number(sa.BigInteger(), "bigint")


def downgrade() -> None:
    _number(sa.Integer(), "integer")


def _number(kind: sa.types.TypeEngine[int], of_sequence: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        return
    op.execute("SET LOCAL statement_timeout = 0")  # the rows of a table are all written anew, in one statement
    for table in _TABLES:
        op.alter_column(table, "number", type_=kind)
        op.execute(f"ALTER SEQUENCE {table}_number_seq AS {of_sequence}")
