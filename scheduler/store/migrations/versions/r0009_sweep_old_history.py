"""Note when commands were consumed and how far logs were swept, and let the sweep, alone, take old audit entries out.

Commands that were consumed before count as consumed at the last tick.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision: str | None = "0008"
branch_labels: str | None = None
depends_on: str | None = None

_ROWS_AT_ONCE = 20_000
_REFUSAL = "the audit log is append-only"
_SWEPT = "coalesce((SELECT up_to_number FROM swept WHERE log = 'audit'), 0)"
_IN_SQLITE = (
    f"CREATE TRIGGER audit_log_refuses_DELETE BEFORE DELETE ON audit_log {{when}}"
    f"BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
)


def upgrade() -> None:
    op.create_table(
        "swept",
        sa.Column("log", sa.String, primary_key=True),
        sa.Column("up_to_number", sa.BigInteger, nullable=False),
        sa.Column("up_to_s", sa.Double, nullable=False),
        sa.Column("rows_untold", sa.BigInteger, nullable=False),
    )
    op.add_column("inbox", sa.Column("consumed_at_s", sa.Double, nullable=True))
    _note_when_commands_were_consumed()
    op.create_index("ix_webhook_deliveries_ended_at_s", "webhook_deliveries", ["ended_at_s"])
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_log_refuses_DELETE")
        op.execute(_IN_SQLITE.format(when=f"WHEN OLD.number > {_SWEPT} "))
        return
    op.execute("DROP TRIGGER audit_log_refuses_changes ON audit_log")
    op.execute(
        "CREATE FUNCTION refuse_audit_removal() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF OLD.number > {_SWEPT} THEN RAISE EXCEPTION '{_REFUSAL}'; END IF; RETURN OLD; END $$"
    )
    _refuse_on_postgresql("UPDATE OR TRUNCATE")
    op.execute(
        "CREATE TRIGGER audit_log_refuses_removal BEFORE DELETE ON audit_log "
        "FOR EACH ROW EXECUTE FUNCTION refuse_audit_removal()"
    )


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_log_refuses_DELETE")
        op.execute(_IN_SQLITE.format(when=""))
    else:
        op.execute("DROP TRIGGER audit_log_refuses_removal ON audit_log")
        op.execute("DROP TRIGGER audit_log_refuses_changes ON audit_log")
        op.execute("DROP FUNCTION refuse_audit_removal()")
        _refuse_on_postgresql("UPDATE OR DELETE OR TRUNCATE")
    op.drop_index("ix_webhook_deliveries_ended_at_s", "webhook_deliveries")
    op.drop_column("inbox", "consumed_at_s")
    op.drop_table("swept")


def _note_when_commands_were_consumed() -> None:
    """In parts, because a server ends a statement that takes long."""
    connection = op.get_bind()
    change = sa.text(
        "UPDATE inbox SET consumed_at_s = (SELECT now_s FROM state) "
        "WHERE number > :after AND number <= :up_to AND consumed_at_generation IS NOT NULL"
    )
    newest = connection.execute(sa.text("SELECT coalesce(max(number), 0) FROM inbox")).scalar_one()
    for after in range(0, newest, _ROWS_AT_ONCE):
        connection.execute(change, {"after": after, "up_to": after + _ROWS_AT_ONCE})


def _refuse_on_postgresql(verbs: str) -> None:
    op.execute(
        f"CREATE TRIGGER audit_log_refuses_changes BEFORE {verbs} ON audit_log "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()"
    )
