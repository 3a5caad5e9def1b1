"""Identify owners by stable ids, and add service accounts.

Until now a display name identified an owner. Everything that an owner had gets the id of that name, and so do the API
tokens that bear the name now. Callers that appear later get ids of their own, so they own none of it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision: str | None = "0015"
branch_labels: str | None = None
depends_on: str | None = None

_ENDED_JOBS_INDEX = "ix_ended_jobs_list"
_ENDED_JOBS_COLUMNS = ["submitted_at_s", "id", "state", "queue", "owner", "name"]
_OWNER_COLUMNS = {"ended_jobs": "owner", "webhooks": "owner", "simulations": "owner", "api_tokens": "name"}
"""Column with the display name, by table that gets the column `owner_id`."""


def upgrade() -> None:
    for table in _OWNER_COLUMNS:
        op.add_column(table, sa.Column("owner_id", sa.String, nullable=False, server_default=""))
    for table, name in _OWNER_COLUMNS.items():
        _fill_owner_ids(table, name)
    op.drop_index(_ENDED_JOBS_INDEX, "ended_jobs")
    op.create_index(_ENDED_JOBS_INDEX, "ended_jobs", [*_ENDED_JOBS_COLUMNS, "owner_id"])
    op.create_index("ix_simulations_owner_id", "simulations", ["owner_id"])
    op.add_column("api_tokens", sa.Column("account_id", sa.String, nullable=False, server_default=""))
    op.create_index("ix_api_tokens_account_id", "api_tokens", ["account_id"])
    op.add_column("audit_log", sa.Column("actor_id", sa.String, nullable=False, server_default=""))
    op.create_table(
        "service_accounts",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("grants", sa.JSON, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("expires_at_s", sa.Double, nullable=True),
        sa.Column("disabled_at_s", sa.Double, nullable=True),
    )
    op.create_index("ix_service_accounts_name", "service_accounts", ["name"], unique=True)


def downgrade() -> None:
    op.drop_table("service_accounts")
    op.drop_column("audit_log", "actor_id")
    op.drop_index("ix_api_tokens_account_id", "api_tokens")
    op.drop_column("api_tokens", "account_id")
    op.drop_index("ix_simulations_owner_id", "simulations")
    op.drop_index(_ENDED_JOBS_INDEX, "ended_jobs")
    for table in _OWNER_COLUMNS:
        op.drop_column(table, "owner_id")
    op.create_index(_ENDED_JOBS_INDEX, "ended_jobs", _ENDED_JOBS_COLUMNS)


def _fill_owner_ids(table: str, name: str) -> None:
    """Apply the rule of `derive_owner_id` as it was at this revision."""
    owner, owner_id = sa.column(name, sa.String), sa.column("owner_id", sa.String)
    namespace = "namespace/"
    derived = sa.case(
        (owner == "", ""),
        (owner == "anybody", "local"),
        (
            sa.func.substr(owner, 1, len(namespace)) == namespace,
            "namespace:" + sa.func.substr(owner, len(namespace) + 1),
        ),
        else_="name:" + owner,
    )
    op.execute(sa.update(sa.table(table, owner, owner_id)).values(owner_id=derived))
