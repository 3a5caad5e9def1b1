"""History of problems in the database: one row for each episode, which the leader replaces until it is closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Double,
    Engine,
    Index,
    Named,
    String,
    Table,
    TypedColumns,
    func,
    select,
)

from scheduler.domain.codec import decode_stored, encode
from scheduler.domain.problems import ProblemEpisode, ProblemKey
from scheduler.store import sql_state
from scheduler.store.database import (
    CODE_POINT_ORDERED,
    METADATA,
    fetch_rows,
    make_autocommit_engine,
    replace_rows,
    transaction,
)


class ProblemEpisodeColumns(TypedColumns):
    """Episodes are found by the columns other than `body`."""

    id: Named[str] = Column(CODE_POINT_ORDERED, primary_key=True)
    code: Named[str] = Column(String)
    kind: Named[str] = Column(String)
    subject: Named[str] = Column(String)
    begin_s: Named[float] = Column(Double)
    end_s: Named[float | None] = Column(Double)
    is_closed: Named[bool] = Column(Boolean)
    body: Named[Any] = Column(JSON, nullable=False)


PROBLEM_EPISODES = Table("problem_episodes", METADATA, ProblemEpisodeColumns)
_ROW = PROBLEM_EPISODES.c
Index("ix_problem_episodes_end", _ROW.end_s)
Index("ix_problem_episodes_closed", _ROW.is_closed, _ROW.begin_s)
Index("ix_problem_episodes_subject", _ROW.subject, _ROW.code)


class SqlProblemHistory:
    """ProblemHistory in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def put_episodes(self, episodes: Sequence[ProblemEpisode], *, epoch: int) -> None:
        with transaction(self._engine) as connection:
            sql_state.fence(connection, epoch)
            replace_rows(connection, PROBLEM_EPISODES, [_build_row(each) for each in episodes])

    def list_open(self) -> tuple[ProblemEpisode, ...]:
        found = select(_ROW.body).where(_ROW.is_closed.is_(False)).order_by(_ROW.begin_s, _ROW.id)
        return tuple(decode_stored(ProblemEpisode, row.body) for row in fetch_rows(self._read_engine, found))

    def list_ended(self, *, since_s: float, limit: int) -> tuple[ProblemEpisode, ...]:
        newest = select(_ROW.body).where(_ROW.end_s >= since_s).order_by(_ROW.end_s.desc(), _ROW.id.desc())
        rows = fetch_rows(self._read_engine, newest.limit(limit))
        return tuple(decode_stored(ProblemEpisode, row.body) for row in rows)

    def find_last_end(self, key: ProblemKey) -> float:
        code, kind, subject = key
        alike = (_ROW.subject == subject, _ROW.code == code.value, _ROW.kind == kind.value)
        [row] = fetch_rows(self._read_engine, select(func.max(_ROW.end_s)).where(*alike))
        return float("-inf") if row[0] is None else float(row[0])


def _build_row(episode: ProblemEpisode) -> dict[str, Any]:
    return {
        "id": episode.id,
        "code": episode.code.value,
        "kind": episode.kind.value,
        "subject": episode.subject,
        "begin_s": episode.begin_s,
        "end_s": episode.end_s,
        "is_closed": episode.is_closed,
        "body": encode(episode),
    }
