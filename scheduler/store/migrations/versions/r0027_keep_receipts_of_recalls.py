"""Keep receipts of recalls: the open ones with the live state, complete ones in history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision: str | None = "0026"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "recalls",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_index("ix_recalls_generation", "recalls", ["generation"])
    by_code_points = sa.String().with_variant(sa.String(collation="C"), "postgresql")
    op.create_table(
        "recall_receipts",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("id", by_code_points, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("asked_at_s", sa.Double, nullable=False),
        sa.Column("closed_at_s", sa.Double, nullable=False),
        sa.Column("pool", sa.String, nullable=False),
        sa.Column("loan_id", sa.String, nullable=False),
    )
    op.create_index("ix_recall_receipts_list", "recall_receipts", ["asked_at_s", "id", "pool"])
    op.create_index("ix_recall_receipts_pool_list", "recall_receipts", ["pool", "asked_at_s", "id"])
    op.create_index("ix_recall_receipts_loan_id", "recall_receipts", ["loan_id"])


def downgrade() -> None:
    op.drop_table("recall_receipts")
    op.drop_table("recalls")
