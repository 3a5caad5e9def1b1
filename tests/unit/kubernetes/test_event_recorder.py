"""EventRecorder: which store events it writes and how many it reads."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.events import Event, EventCode
from scheduler.kubernetes.api_objects import ELASTIC_JOB
from scheduler.kubernetes.event_recorder import EVENTS_PER_ROUND_MAX, SERIES_WINDOW_S, EventRecorder
from scheduler.kubernetes.resource_writes import Create, Patch, PublishState
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, Page, StoredEvent
from tests.unit.kubernetes.operator_rig import NAMESPACE, NOW_S, OperatorRig

MANY = 20_000
SPEC = {"gpus": {"min": 1, "max": 2}, "command": ["x"]}


class CountingStore(MemoryStore):
    read = 0

    def list_events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        found = super().list_events(page, subject=subject)
        self.read += len(found)
        return found


def record_events(store: MemoryStore, *events: Event) -> None:
    previous = store.load().snapshot
    store.commit(Commit(previous, replace(previous, generation=previous.generation + 1), epoch=0, events=events))


def build_state() -> tuple[PublishState, str]:
    rig = OperatorRig()
    rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace=NAMESPACE)
    rig.run_until_stable()
    (job_id,) = rig.snapshot.jobs
    world = PublishState(rig.snapshot, rig.compute_commands(), NOW_S, 3, NAMESPACE)
    return world, job_id


def notes(story: EventRecorder, world: PublishState) -> list[str]:
    steps = [step for each in story.build_writes(world) for step in each]
    return [
        step.body["note"] if isinstance(step, Create) else "again" for step in steps if isinstance(step, Create | Patch)
    ]


def test_new_leader_writes_recent_events_and_reads_few_others() -> None:
    world, job_id = build_state()
    store = CountingStore()
    record_events(store, *(Event(1.0, EventCode.JOB_STARTED, job_id, f"old {number}") for number in range(MANY)))
    record_events(store, Event(NOW_S - SERIES_WINDOW_S + 1, EventCode.JOB_STARTED, job_id, "new"))
    story = EventRecorder(store, reporting_instance="a")
    assert notes(story, world) == ["new"]
    assert store.read < MANY / 10
    record_events(store, Event(NOW_S, EventCode.JOB_STARTED, job_id, "newer"))
    assert notes(story, world) == ["newer"]


def test_events_after_an_empty_store_are_written() -> None:
    world, job_id = build_state()
    store = MemoryStore()
    story = EventRecorder(store, reporting_instance="a")
    assert notes(story, world) == []
    record_events(store, Event(NOW_S, EventCode.JOB_STARTED, job_id, "first"))
    assert notes(story, world) == ["first"]


def test_many_events_are_written_over_several_rounds() -> None:
    world, job_id = build_state()
    store = MemoryStore()
    messages = [f"number {number}" for number in range(2 * EVENTS_PER_ROUND_MAX + 20)]
    record_events(store, *(Event(NOW_S, EventCode.JOB_STARTED, job_id, message) for message in messages))
    recorder = EventRecorder(store, reporting_instance="a")
    rounds = [(notes(recorder, world), recorder.has_more) for _ in range(4)]
    assert [has_more for _, has_more in rounds] == [True, True, False, False]
    assert [note for written, _ in rounds for note in written] == messages
