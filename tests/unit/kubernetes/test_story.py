"""Which of the store's events a leader tells, and how many it reads for that."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.events import Event, EventCode
from scheduler.kubernetes.api_objects import ELASTIC_JOB
from scheduler.kubernetes.event_recorder import SERIES_WINDOW_S, EventRecorder
from scheduler.kubernetes.resource_writes import Create, Patch, PublishState
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, Page, StoredEvent
from tests.unit.kubernetes.operating import NAMESPACE, NOW_S, Operating

MANY = 20_000
SPEC = {"gpus": {"min": 1, "max": 2}, "command": ["x"]}


class CountingStore(MemoryStore):
    read = 0

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        found = super().list_events(page, subject=subject)
        self.read += len(found)
        return found


def tell(store: MemoryStore, *events: Event) -> None:
    previous = store.load().snapshot
    store.commit(Commit(previous, replace(previous, generation=previous.generation + 1), epoch=0, events=events))


def a_world() -> tuple[PublishState, str]:
    rig = Operating()
    rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace=NAMESPACE)
    rig.settle()
    (job_id,) = rig.snapshot.jobs
    world = PublishState(rig.snapshot, rig.take(), NOW_S, 3, NAMESPACE)
    return world, job_id


def notes(story: EventRecorder, world: PublishState) -> list[str]:
    steps = [step for each in story.build_writes(world) for step in each]
    return [
        step.body["note"] if isinstance(step, Create) else "again" for step in steps if isinstance(step, Create | Patch)
    ]


def test_a_new_leader_tells_what_is_new_enough_and_reads_little_more() -> None:
    world, job_id = a_world()
    store = CountingStore()
    tell(store, *(Event(1.0, EventCode.JOB_STARTED, job_id, f"old {number}") for number in range(MANY)))
    tell(store, Event(NOW_S - SERIES_WINDOW_S + 1, EventCode.JOB_STARTED, job_id, "new"))
    story = EventRecorder(store, reporting_instance="a")
    assert notes(story, world) == ["new"]
    assert store.read < MANY / 10
    tell(store, Event(NOW_S, EventCode.JOB_STARTED, job_id, "newer"))
    assert notes(story, world) == ["newer"]


def test_an_empty_store_has_nothing_to_tell_and_what_comes_then_is_told() -> None:
    world, job_id = a_world()
    store = MemoryStore()
    story = EventRecorder(store, reporting_instance="a")
    assert notes(story, world) == []
    tell(store, Event(NOW_S, EventCode.JOB_STARTED, job_id, "first"))
    assert notes(story, world) == ["first"]
