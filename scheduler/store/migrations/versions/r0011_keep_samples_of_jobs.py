"""Keep samples of what jobs report of their work; a database from before has none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision: str | None = "0010"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "job_samples",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("steps", sa.Double, nullable=False),
        sa.Column("loss", sa.Double, nullable=True),
        sa.Column("samples_per_s", sa.Double, nullable=True),
        sa.Column("peak_bytes", sa.BigInteger, nullable=True),
    )


def downgrade() -> None:
    op.drop_table("job_samples")
