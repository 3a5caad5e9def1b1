"""The store's events as Events of the cluster: one object for a note that is repeated, with a count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from scheduler.domain.event import EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.intake import Resources
from scheduler.k8s.kinds import ELASTIC_JOB, EVENT, LOAN, MANAGED_BY, NODE, POOL, QUEUE, Kind
from scheduler.k8s.resources.elastic_job import is_managed_by_us, job_id_of, job_of
from scheduler.k8s.resources.metadata import Metadata, metadata, part
from scheduler.k8s.steps import Create, Patch, Steps
from scheduler.store.protocol import StoredEvent

WINDOW_S = 600.0
"""A note that is repeated within so long of the last time is counted, and not written anew."""
SERIES_MAX = 10_000
_NOTE_CHARACTERS = 1000
_CLUSTER_NAMESPACE = "default"
"""Where Events of objects without a namespace have to lie."""
_WARNINGS = frozenset(
    {
        EventCode.JOB_PREEMPTED,
        EventCode.JOB_REJECTED,
        EventCode.JOB_LOST_WORK,
        EventCode.LOAN_LOST,
        EventCode.DEMAND_CLAMPED,
        EventCode.COMMAND_REFUSED,
        EventCode.DECISION_DROPPED,
        EventCode.BREACH,
    }
)


@dataclass(frozen=True, slots=True)
class Regarding:
    """The object that an event is about."""

    kind: Kind
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Series:
    """An Event that was written: its place, when its note was last told, and how often."""

    namespace: str
    name: str
    last_at_s: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class EventLog:
    """What was written lately, by a digest of what makes two events the same. Lost with its process: the next one
    begins series anew."""

    series: Mapping[str, Series] = field(default_factory=dict)


def subjects(resources: Resources, snapshot: Snapshot, *, job_namespace: str) -> dict[str, Regarding]:
    """The objects of the cluster by what the store's events call them. Where names are shared, a job comes before a
    node, a node before a loan, a pool and a queue. That a job which has ended is a resource's own is known by the
    status that we wrote."""
    metas = [(metadata(each), each) for each in resources.elastic_jobs if is_managed_by_us(each)]
    jobs = [
        meta
        for meta, each in metas
        if job_of(meta, snapshot.jobs, job_namespace) is not None
        or part(each, "status").get("jobId") == job_id_of(meta)
    ]
    found: dict[str, Regarding] = {}
    for kind, group in ((QUEUE, resources.queues), (POOL, resources.pools), (LOAN, resources.loans)):
        found |= {metadata(each).name: _regarding(kind, metadata(each)) for each in group}
    nodes = (metadata(each) for each in resources.nodes)
    found |= {node.name: _regarding(NODE, node) for node in nodes if node.name in snapshot.nodes}
    return found | {job_id_of(meta): _regarding(ELASTIC_JOB, meta) for meta in jobs}


def record(
    log: EventLog, events: Iterable[StoredEvent], known: Mapping[str, Regarding], *, reporter: str
) -> tuple[EventLog, tuple[Steps, ...]]:
    """The log with these events, and what has to be written for it. Events about nothing in the cluster are left out.

    An Event is named by the number of the first of its series, so that writing it again after a crash finds it there.
    `reporter` is the name of this process.
    """
    series, written = dict(log.series), dict[str, Steps]()
    for stored in events:
        event, about = stored.event, known.get(stored.event.subject)
        if about is None:
            continue
        key = _digest(about.uid or about.name, event.code, event.message)
        before = series.get(key)
        if before is not None and event.at_s - before.last_at_s <= WINDOW_S:
            series[key] = again = replace(before, last_at_s=event.at_s, count=before.count + 1)
            counted = Patch(EVENT, again.namespace, again.name, {"series": _series(again)})
            written[again.name] = (*(step for step in written.get(again.name, ()) if isinstance(step, Create)), counted)
            continue
        body = _event(stored, about, reporter)
        series[key] = Series(body["metadata"]["namespace"], body["metadata"]["name"], event.at_s)
        written[body["metadata"]["name"]] = (Create(EVENT, body),)
    return EventLog(_recent(series)), tuple(written.values())


def _regarding(kind: Kind, meta: Metadata) -> Regarding:
    return Regarding(kind, meta.namespace, meta.name, meta.uid)


def _event(stored: StoredEvent, about: Regarding, reporter: str) -> dict[str, Any]:
    event = stored.event
    regarding = {
        "apiVersion": about.kind.api_version,
        "kind": about.kind.name,
        "name": about.name,
        "namespace": about.namespace,
        "uid": about.uid,
    }
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {
            "name": f"{about.name[:200]}.{stored.number:016x}",
            "namespace": about.namespace or _CLUSTER_NAMESPACE,
        },
        "eventTime": _micro_time(event.at_s),
        "type": "Warning" if event.code in _WARNINGS else "Normal",
        "reason": event.code.value,
        "action": event.code.value,
        "note": event.message[:_NOTE_CHARACTERS],
        "regarding": {name: value for name, value in regarding.items() if value},
        "reportingController": MANAGED_BY,
        "reportingInstance": reporter[:128],
    }


def _series(series: Series) -> dict[str, Any]:
    return {"count": series.count, "lastObservedTime": _micro_time(series.last_at_s)}


def _recent(series: Mapping[str, Series]) -> Mapping[str, Series]:
    """Those that were told last: no more than fit into a process for ever."""
    newest = sorted(series.items(), key=lambda item: item[1].last_at_s)[-SERIES_MAX:]
    end_s = newest[-1][1].last_at_s if newest else 0.0
    return {key: each for key, each in newest if end_s - each.last_at_s <= WINDOW_S}


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()


def _micro_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
