"""Keep API tokens, and an audit log to which rows can only be added; a database from before has neither."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision: str | None = "0004"
branch_labels: str | None = None
depends_on: str | None = None

_REFUSAL = "the audit log is append-only"


def upgrade() -> None:
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("prefix", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("grants", sa.JSON, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=True),
        sa.Column("last_used_at_s", sa.Double, nullable=True),
        sa.Column("revoked_at_s", sa.Double, nullable=True),
    )
    op.create_index("ix_api_tokens_digest", "api_tokens", ["digest"], unique=True)
    op.create_table(
        "audit_log",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("at_s", sa.Double, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("actor", "token_id", "action", "subject")),
        sa.Column("before", sa.JSON, nullable=True),
        sa.Column("after", sa.JSON, nullable=True),
        *(sa.Column(name, sa.String, nullable=False) for name in ("request_id", "outcome")),
    )
    op.create_index("ix_audit_log_actor_number", "audit_log", ["actor", "number"])
    op.create_index("ix_audit_log_subject_number", "audit_log", ["subject", "number"])
    for statement in _guards(op.get_bind().dialect.name):
        op.execute(statement)


def downgrade() -> None:
    op.drop_table("audit_log")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_audit_change()")
    op.drop_table("api_tokens")


def _guards(dialect: str) -> list[str]:
    if dialect == "sqlite":
        return [
            f"CREATE TRIGGER audit_log_refuses_{verb} BEFORE {verb} ON audit_log "
            f"BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
            for verb in ("UPDATE", "DELETE")
        ]
    return [
        "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$",
        "CREATE TRIGGER audit_log_refuses_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log "
        "FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()",
    ]
