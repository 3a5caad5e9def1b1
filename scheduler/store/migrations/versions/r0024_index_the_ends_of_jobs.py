"""Index the time at which jobs ended, inside their bodies, which releases from before write as well."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision: str | None = "0023"
branch_labels: str | None = None
depends_on: str | None = None

_ENDED_AT_S = {
    "sqlite": "json_extract(body, '$.state_since_s')",
    "postgresql": "CAST(body ->> 'state_since_s' AS double precision)",
}


def upgrade() -> None:
    ended_at_s = sa.text(_ENDED_AT_S[op.get_bind().dialect.name])
    op.create_index("ix_ended_jobs_ended_at", "ended_jobs", [ended_at_s, "number"])


def downgrade() -> None:
    op.drop_index("ix_ended_jobs_ended_at", "ended_jobs")
