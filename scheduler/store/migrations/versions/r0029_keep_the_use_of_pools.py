"""Keep the use of pools over time, checkpoints of the fleet, and forecast fans."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision: str | None = "0028"
branch_labels: str | None = None
depends_on: str | None = None

_SUMS = (
    "seconds", "inference_gpu_s", "used_gpu_s", "lent_used_gpu_s", "lent_idle_gpu_s", "free_gpu_s", "other_gpu_s",
    "down_gpu_s", "lent_idle_waited_gpu_s", "free_waited_gpu_s", "lent_node_s", "demand_gpu_s", "demand_s", "short_s",
    "demand_gpus_max",
)  # fmt: skip
_COUNTS = (
    "lends", "recalls", "returns", "late_returns", "lent_nodes_max", "pending_jobs_max", "pending_gpus_max",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "capacity_bins",
        sa.Column("step_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("pool", sa.String, primary_key=True),
        sa.Column("at_s", sa.BigInteger, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Double, nullable=False) for name in _SUMS),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS),
    )
    op.create_index("ix_capacity_bins_time", "capacity_bins", ["step_s", "at_s"])
    op.create_table(
        "fleet_checkpoints",
        sa.Column("at_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("is_hourly", sa.Boolean, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "forecast_fans",
        sa.Column("pool", sa.String, primary_key=True),
        sa.Column("body", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("forecast_fans")
    op.drop_table("fleet_checkpoints")
    op.drop_table("capacity_bins")
