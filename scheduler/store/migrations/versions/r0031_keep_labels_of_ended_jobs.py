"""Keep the labels of ended jobs in rows of their own, with an index for searches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision: str | None = "0030"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    job_id = sa.String().with_variant(sa.String(collation="C"), "postgresql")
    op.create_table(
        "ended_job_labels",
        sa.Column("job_id", job_id, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.String, nullable=False),
        sa.Column("submitted_at_s", sa.Double, nullable=False),
    )
    columns = ["key", "value", "submitted_at_s", "job_id"]
    op.create_index("ix_ended_job_labels_list", "ended_job_labels", columns)


def downgrade() -> None:
    op.drop_table("ended_job_labels")
