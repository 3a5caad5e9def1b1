"""Say which solver made the curves. Of points from before that nothing is known, so they are solved anew."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("state", sa.Column("solver", sa.String, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("state", "solver")
