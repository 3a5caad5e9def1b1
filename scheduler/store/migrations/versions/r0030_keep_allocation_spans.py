"""Keep allocation spans: which job held which GPUs of a node. Those of running jobs begin with their next change.

Simulations have a description; those from before have none.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision: str | None = "0029"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "allocation_spans",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("owner_id", sa.String, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("node", sa.String, nullable=False),
        sa.Column("pool", sa.String, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
        sa.Column("indices", sa.JSON, nullable=False),
        sa.Column("is_lent", sa.Boolean, nullable=False),
        sa.Column("begin_s", sa.Double, nullable=False),
        sa.Column("end_s", sa.Double, nullable=True),
        sa.Column("end_reason", sa.String, nullable=True),
    )
    op.create_index("ix_allocation_spans_end", "allocation_spans", ["end_s", "begin_s"])
    op.create_index("ix_allocation_spans_job", "allocation_spans", ["job_id", "node", "end_s"])
    op.create_index("ix_allocation_spans_node", "allocation_spans", ["node", "end_s"])
    op.add_column("simulations", sa.Column("description", sa.String, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("simulations", "description")
    op.drop_table("allocation_spans")
