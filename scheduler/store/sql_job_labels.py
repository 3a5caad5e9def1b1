"""Labels of ended jobs in the database, and conditions on them. Live jobs are in memory, with their labels.

A row is written with the record of its job and never changes; retention deletes both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Double,
    Index,
    Named,
    String,
    Table,
    TypedColumns,
    delete,
    func,
    select,
)

from scheduler.domain.job import Job
from scheduler.domain.job_labels import LabelOperator, LabelRequirement, LabelSelector
from scheduler.store.database import CODE_POINT_ORDERED, METADATA, build_insert

_NO_VALUE = " "
"""Stands for the value of a label that a job does not have. No label has this value."""


class LabelColumns(TypedColumns):
    """`submitted_at_s` is that of the job, so that the index lists the jobs with a label in the order of lists."""

    job_id: Named[str] = Column(CODE_POINT_ORDERED, primary_key=True)
    key: Named[str] = Column(String, primary_key=True)
    value: Named[str] = Column(String)
    submitted_at_s: Named[float] = Column(Double)


LABELS = Table("ended_job_labels", METADATA, LabelColumns)
Index("ix_ended_job_labels_list", LABELS.c.key, LABELS.c.value, LABELS.c.submitted_at_s, LABELS.c.job_id)


def insert_labels(connection: Connection, ended_jobs: Iterable[Job]) -> None:
    """Write the labels of jobs that have ended. Those of a later record with the same id win."""
    rows = {
        (job.id, key): {"job_id": job.id, "key": key, "value": value, "submitted_at_s": job.submitted_at_s}
        for job in ended_jobs
        for key, value in job.spec.labels.items()
    }
    if not rows:
        return
    statement = build_insert(connection, LABELS)
    later = {name: statement.excluded[name] for name in ("value", "submitted_at_s")}
    connection.execute(
        statement.on_conflict_do_update(index_elements=["job_id", "key"], set_=later), list(rows.values())
    )


def delete_labels(connection: Connection, job_ids: Collection[str]) -> None:
    connection.execute(delete(LABELS).where(LABELS.c.job_id.in_(job_ids)))


def build_label_conditions(selector: LabelSelector, job_id: ColumnElement[str]) -> Iterator[ColumnElement[bool]]:
    """Yield the requirements as conditions on the job with the id `job_id`, a column of the enclosing query.

    A scalar subquery is looked up row by row in every database, so that a page costs as much as the rows it reads. No
    index applies to the expression of the key, so that the lookup goes by the job even where statistics are too old to
    know that many jobs have the key.
    """
    for each in selector:
        found = select(LABELS.c.value).where(LABELS.c.job_id == job_id, LABELS.c.key.concat("") == each.key)
        value = found.correlate_except(LABELS).scalar_subquery()
        match each.operator:
            case LabelOperator.IN:
                yield value.in_(each.values)
            case LabelOperator.NOT_IN:
                yield func.coalesce(value, _NO_VALUE).not_in(each.values)
            case LabelOperator.EXISTS:
                yield value.is_not(None)
            case LabelOperator.ABSENT:
                yield value.is_(None)


def build_label_ranges(selector: LabelSelector) -> Iterator[tuple[ColumnElement[bool], ...]]:
    """Yield conditions on rows of the index, one for each requirement that a job can only meet with a label."""
    for each in selector:
        if each.operator is LabelOperator.IN:
            yield LABELS.c.key == each.key, LABELS.c.value.in_(each.values)
        elif each.operator is LabelOperator.EXISTS:
            yield (LABELS.c.key == each.key,)


def find_equality(selector: LabelSelector) -> LabelRequirement | None:
    """Return the first requirement of one value, whose jobs the index lists in order, or None."""
    return next((each for each in selector if each.operator is LabelOperator.IN and len(each.values) == 1), None)
