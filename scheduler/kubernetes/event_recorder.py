"""EventRecorder: the store's events as Kubernetes Events. Repeated events become one Event with a count (a series)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from scheduler.domain.events import EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import (
    ELASTIC_JOB,
    EVENT,
    GPU_PROFILE,
    LOAN,
    MANAGED_BY,
    NODE,
    POOL,
    QUEUE,
    ResourceKind,
)
from scheduler.kubernetes.resource_writes import Create, Patch, PublishState, Writes
from scheduler.kubernetes.resources.elastic_job import derive_job_id, find_job, is_managed_by_us
from scheduler.kubernetes.resources.meta import Metadata, get_mapping, parse_metadata
from scheduler.kubernetes.spec_commands import ClusterResources
from scheduler.store.protocol import Page, Store, StoredEvent

SERIES_WINDOW_S = 600.0
"""A repetition within this time of the last one is counted in the same series."""
SERIES_MAX = 10_000
_NOTE_MAX_LENGTH = 1000
_CLUSTER_SCOPED_NAMESPACE = "default"
"""Namespace of Events about cluster-scoped objects."""
_WARNING_CODES = frozenset(
    {
        EventCode.JOB_PREEMPTED,
        EventCode.JOB_REJECTED,
        EventCode.JOB_LOST_WORK,
        EventCode.JOB_HAS_NO_SESSION,
        EventCode.LOAN_LOST,
        EventCode.DEMAND_CLAMPED,
        EventCode.DEMAND_UNKNOWN,
        EventCode.DEMAND_UNMET,
        EventCode.COMMAND_REFUSED,
        EventCode.DECISION_DROPPED,
        EventCode.BREACH,
    }
)


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """The object that an Event regards."""

    kind: ResourceKind
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class EventSeries:
    """A written Event: its key, the time of its last repetition, and its count."""

    namespace: str
    name: str
    last_at_s: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class EventSeriesLog:
    """Recent series by a digest of object, code and message. In memory only: a new process starts new series."""

    series: Mapping[str, EventSeries] = field(default_factory=dict)


def index_event_objects(
    resources: ClusterResources, snapshot: Snapshot, *, job_namespace: str
) -> dict[str, ObjectReference]:
    """Return the API objects by the subject names that the store's events use.

    A shared name means the job first, then the node, loan, pool, queue or GPU profile. An ended job belongs to the
    resource whose status names it.
    """
    metas = [(parse_metadata(each), each) for each in resources.elastic_jobs if is_managed_by_us(each)]
    jobs = [
        meta
        for meta, each in metas
        if find_job(meta, snapshot.jobs, job_namespace) is not None
        or get_mapping(each, "status").get("jobId") == derive_job_id(meta)
    ]
    found: dict[str, ObjectReference] = {}
    fleet = (
        (GPU_PROFILE, resources.gpu_profiles),
        (QUEUE, resources.queues),
        (POOL, resources.pools),
        (LOAN, resources.loans),
    )
    for kind, group in fleet:
        found |= {parse_metadata(each).name: _object_reference(kind, parse_metadata(each)) for each in group}
    nodes = (parse_metadata(each) for each in resources.nodes)
    found |= {node.name: _object_reference(NODE, node) for node in nodes if node.name in snapshot.nodes}
    return found | {derive_job_id(meta): _object_reference(ELASTIC_JOB, meta) for meta in jobs}


def build_event_writes(
    log: EventSeriesLog,
    events: Iterable[StoredEvent],
    objects: Mapping[str, ObjectReference],
    *,
    reporting_instance: str,
) -> tuple[EventSeriesLog, tuple[Writes, ...]]:
    """Return the updated log and the writes for these events. Events without an API object are dropped.

    An Event is named by the number of the first store event of its series, so that writing it again after a crash is a
    no-op.
    """
    series, writes = dict(log.series), dict[str, Writes]()
    for stored in events:
        event, about = stored.event, objects.get(stored.event.subject)
        if about is None:
            continue
        key = _series_key(about.uid or about.name, event.code, event.message)
        before = series.get(key)
        if before is not None and event.at_s - before.last_at_s <= SERIES_WINDOW_S:
            series[key] = series_now = replace(before, last_at_s=event.at_s, count=before.count + 1)
            patch = Patch(EVENT, series_now.namespace, series_now.name, {"series": _series_fields(series_now)})
            writes[series_now.name] = (
                *(step for step in writes.get(series_now.name, ()) if isinstance(step, Create)),
                patch,
            )
            continue
        body = _build_event(stored, about, reporting_instance)
        series[key] = EventSeries(body["metadata"]["namespace"], body["metadata"]["name"], event.at_s)
        writes[body["metadata"]["name"]] = (Create(EVENT, body),)
    return EventSeriesLog(_drop_expired_series(series)), tuple(writes.values())


def _object_reference(kind: ResourceKind, meta: Metadata) -> ObjectReference:
    return ObjectReference(kind, meta.namespace, meta.name, meta.uid)


def _build_event(stored: StoredEvent, regarding_object: ObjectReference, reporting_instance: str) -> dict[str, Any]:
    event = stored.event
    regarding = {
        "apiVersion": regarding_object.kind.api_version,
        "kind": regarding_object.kind.name,
        "name": regarding_object.name,
        "namespace": regarding_object.namespace,
        "uid": regarding_object.uid,
    }
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {
            "name": f"{regarding_object.name[:200]}.{stored.number:016x}",
            "namespace": regarding_object.namespace or _CLUSTER_SCOPED_NAMESPACE,
        },
        "eventTime": _format_micro_time(event.at_s),
        "type": "Warning" if event.code in _WARNING_CODES else "Normal",
        "reason": event.code.value,
        "action": event.code.value,
        "note": event.message[:_NOTE_MAX_LENGTH],
        "regarding": {name: value for name, value in regarding.items() if value},
        "reportingController": MANAGED_BY,
        "reportingInstance": reporting_instance[:128],
    }


def _series_fields(series: EventSeries) -> dict[str, Any]:
    return {"count": series.count, "lastObservedTime": _format_micro_time(series.last_at_s)}


def _drop_expired_series(series: Mapping[str, EventSeries]) -> Mapping[str, EventSeries]:
    """Return the most recent series, at most `SERIES_MAX`, to bound memory."""
    newest = sorted(series.items(), key=lambda item: item[1].last_at_s)[-SERIES_MAX:]
    end_s = newest[-1][1].last_at_s if newest else 0.0
    return {key: each for key, each in newest if end_s - each.last_at_s <= SERIES_WINDOW_S}


def _series_key(*parts: str) -> str:
    return sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()


def _format_micro_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


EVENTS_PER_ROUND_MAX = 50


class EventRecorder:
    """Writer of Events for new store events, at most EVENTS_PER_ROUND_MAX at once.

    A new recorder starts one window back; existing Events are not duplicated.
    """

    def __init__(self, store: Store, *, reporting_instance: str) -> None:
        self._store = store
        self._reporting_instance = reporting_instance
        self._log = EventSeriesLog()
        self._last_number: int | None = None
        self.has_more = False
        """Whether the last call left events to the next one."""

    def build_writes(self, state: PublishState) -> tuple[Writes, ...]:
        """Return the writes for the next events since the last call."""
        events = self._read_new_events(state.now_s)
        if not events:
            return ()
        objects = index_event_objects(state.resources, state.snapshot, job_namespace=state.job_namespace)
        self._log, writes = build_event_writes(self._log, events, objects, reporting_instance=self._reporting_instance)
        return writes

    def _read_new_events(self, now_s: float) -> list[StoredEvent]:
        since_s = now_s - SERIES_WINDOW_S if self._last_number is None else float("-inf")
        start = self._find_start(since_s) if self._last_number is None else self._last_number
        found = self._store.list_events(Page(after=start, limit=EVENTS_PER_ROUND_MAX))
        self.has_more = len(found) == EVENTS_PER_ROUND_MAX
        self._last_number = found[-1].number if found else start
        return [stored for stored in found if stored.event.at_s >= since_s]

    def _find_start(self, at_s: float) -> int:
        """Return the number of an event of which at most the next one is older than `at_s`.

        Binary search, because stores keep years of events.
        """
        low, step = 0, 1
        while self._is_older(low + step, at_s):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_older(middle, at_s) else (low, middle)
        return low

    def _is_older(self, number: int, at_s: float) -> bool:
        """Return whether the event after this number is older than `at_s`."""
        page = self._store.list_events(Page(after=number, limit=1))
        return bool(page) and page[0].event.at_s < at_s
