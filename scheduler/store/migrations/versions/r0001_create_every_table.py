"""Create every table, and the one row each of state and lease."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

RECORD_TABLES = ("pools", "nodes", "jobs", "loans", "demand", "forecasts")
HISTORY_TABLES = ("ended_jobs", "ended_loans")
OTHER_TABLES = ("curve_points", "inbox", "events", "decisions", "readings", "state", "lease")


def upgrade() -> None:
    for name in RECORD_TABLES:
        _create_live_state(name, ("key",))
    _create_live_state("curve_points", ("curve_key", "shape"))
    for name in HISTORY_TABLES:
        op.create_table(name, _number(), sa.Column("id", sa.String, nullable=False), _generation(), _body())
        op.create_index(f"ix_{name}_id", name, ["id"])
    _create_inbox()
    _create_logs()
    _create_state()
    _create_lease()


def downgrade() -> None:
    for name in (*RECORD_TABLES, *HISTORY_TABLES, *OTHER_TABLES):
        op.drop_table(name)


def _create_live_state(name: str, keys: tuple[str, ...]) -> None:
    op.create_table(
        name,
        *(sa.Column(key, sa.String, primary_key=True) for key in keys),
        _generation(),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_index(f"ix_{name}_generation", name, ["generation"])


def _create_inbox() -> None:
    op.create_table(
        "inbox",
        _number(),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("consumed_at_generation", sa.BigInteger, nullable=True),
        _body(),
    )
    op.create_index("ix_inbox_id", "inbox", ["id"], unique=True)
    op.create_index("ix_inbox_consumed_at_generation", "inbox", ["consumed_at_generation"])


def _create_logs() -> None:
    subject = sa.Column("subject", sa.String, nullable=False)
    op.create_table("events", _number(), _generation(), _double("at_s"), subject, _body())
    op.create_index("ix_events_subject_number", "events", ["subject", "number"])
    op.create_table("decisions", _number(), _generation(), _double("at_s"), _body())
    pool = sa.Column("pool", sa.String, nullable=False)
    op.create_table("readings", _number(), pool, _double("at_s"), _double("gpus"), _double("asked_gpus"))
    op.create_index("ix_readings_pool_at_s", "readings", ["pool", "at_s"])


def _create_state() -> None:
    state = op.create_table(
        "state",
        _only_id(),
        _generation(),
        sa.Column("swept_generation", sa.BigInteger, nullable=False),
        _double("now_s"),
        _double("full_pass_at_s"),
        sa.Column("switches", sa.JSON, nullable=False),
    )
    empty = {"generation": 0, "swept_generation": 0, "now_s": 0.0, "full_pass_at_s": float("-inf"), "switches": {}}
    op.bulk_insert(state, [{"id": 1, **empty}])


def _create_lease() -> None:
    holder, epoch = sa.Column("holder", sa.String, nullable=False), sa.Column("epoch", sa.BigInteger, nullable=False)
    lease = op.create_table("lease", _only_id(), holder, epoch, _double("expires_at_s"))
    op.bulk_insert(lease, [{"id": 1, "holder": "", "epoch": 0, "expires_at_s": float("-inf")}])


def _only_id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True, autoincrement=False)


def _number() -> sa.Column[int]:
    return sa.Column("number", sa.Integer, primary_key=True)


def _generation() -> sa.Column[int]:
    return sa.Column("generation", sa.BigInteger, nullable=False)


def _double(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=False)


def _body() -> sa.Column[object]:
    return sa.Column("body", sa.JSON, nullable=False)
