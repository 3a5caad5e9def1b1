"""Keep how each commit changed the fleet, and when problems began and ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision: str | None = "0031"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "fleet_changes",
        sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_fleet_changes_time", "fleet_changes", ["at_s"])
    op.create_table(
        "problem_episodes",
        sa.Column("id", sa.String().with_variant(sa.String(collation="C"), "postgresql"), primary_key=True),
        sa.Column("code", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("begin_s", sa.Double, nullable=False),
        sa.Column("end_s", sa.Double, nullable=True),
        sa.Column("is_closed", sa.Boolean, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
    )
    op.create_index("ix_problem_episodes_end", "problem_episodes", ["end_s"])
    op.create_index("ix_problem_episodes_closed", "problem_episodes", ["is_closed", "begin_s"])
    op.create_index("ix_problem_episodes_subject", "problem_episodes", ["subject", "code"])


def downgrade() -> None:
    op.drop_table("problem_episodes")
    op.drop_table("fleet_changes")
