"""Samples of jobs' work in the database: at most `SAMPLES_MAX` rows a job, which newer ones take over by and by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Double, Named, Row, Select, String, Table, TypedColumns, select
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.domain.sample import PlacedSample, Sample
from scheduler.store.tables import METADATA

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class JobSampleColumns(TypedColumns):
    job_id: Named[str] = Column(String, primary_key=True)
    place: Named[int] = Column(primary_key=True, autoincrement=False)
    at_s: Named[float] = Column(Double)
    steps: Named[float] = Column(Double)
    loss: Named[float | None] = Column(Double)
    samples_per_s: Named[float | None] = Column(Double)
    peak_bytes: Named[int | None] = Column(BigInteger)


JOB_SAMPLES = Table("job_samples", METADATA, JobSampleColumns)
_KEY = ["job_id", "place"]
_TOLD = ("at_s", "steps", "loss", "samples_per_s", "peak_bytes")


def put_samples(connection: Connection, placed: Iterable[PlacedSample]) -> None:
    """Put samples into their places, in the transaction of `connection`; the last one of a place is the one kept."""
    last = {(each.job_id, each.place): each.sample for each in placed}
    if not last:
        return
    rows = [
        {"job_id": job_id, "place": place, **{name: getattr(sample, name) for name in _TOLD}}
        for (job_id, place), sample in last.items()
    ]
    putting = _INSERTS[connection.dialect.name](JOB_SAMPLES)
    newer = {name: putting.excluded[name] for name in _TOLD}
    connection.execute(putting.on_conflict_do_update(index_elements=_KEY, set_=newer), rows)


def select_samples(job_id: str) -> Select[*tuple[Any, ...]]:
    return select(JOB_SAMPLES).where(JOB_SAMPLES.c.job_id == job_id).order_by(JOB_SAMPLES.c.at_s)


def sample(row: Row[*tuple[Any, ...]]) -> Sample:
    return Sample(row.at_s, row.steps, row.loss, row.samples_per_s, row.peak_bytes)
