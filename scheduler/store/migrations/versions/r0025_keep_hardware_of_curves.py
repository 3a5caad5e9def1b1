"""Keep digests of the hardware that curves were solved from; curves from before are solved again where any was set."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision: str | None = "0024"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "curve_hardware",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_index("ix_curve_hardware_generation", "curve_hardware", ["generation"])


def downgrade() -> None:
    op.drop_table("curve_hardware")
