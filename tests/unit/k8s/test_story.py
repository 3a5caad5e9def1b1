"""Which of the store's events a leader tells, and how many it reads for that."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.event import Event, EventCode
from scheduler.k8s.event_log import WINDOW_S
from scheduler.k8s.kinds import ELASTIC_JOB
from scheduler.k8s.steps import Create, Patch
from scheduler.k8s.story import Story
from scheduler.k8s.writing import World
from scheduler.store.memory import MemoryStore
from scheduler.store.protocol import Commit, Page, StoredEvent
from tests.unit.k8s.operating import NAMESPACE, NOW_S, Operating

MANY = 20_000
SPEC = {"gpus": {"min": 1, "max": 2}, "command": ["x"]}


class CountingStore(MemoryStore):
    read = 0

    def events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        found = super().events(page, subject=subject)
        self.read += len(found)
        return found


def tell(store: MemoryStore, *events: Event) -> None:
    previous = store.load().snapshot
    store.commit(Commit(previous, replace(previous, generation=previous.generation + 1), epoch=0, events=events))


def a_world() -> tuple[World, str]:
    rig = Operating()
    rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace=NAMESPACE)
    rig.settle()
    (job_id,) = rig.snapshot.jobs
    world = World(rig.snapshot, rig.take(), NOW_S, 3, NAMESPACE)
    return world, job_id


def notes(story: Story, world: World) -> list[str]:
    steps = [step for each in story.steps(world) for step in each]
    return [
        step.body["note"] if isinstance(step, Create) else "again" for step in steps if isinstance(step, Create | Patch)
    ]


def test_a_new_leader_tells_what_is_new_enough_and_reads_little_more() -> None:
    world, job_id = a_world()
    store = CountingStore()
    tell(store, *(Event(1.0, EventCode.JOB_STARTED, job_id, f"old {number}") for number in range(MANY)))
    tell(store, Event(NOW_S - WINDOW_S + 1, EventCode.JOB_STARTED, job_id, "new"))
    story = Story(store, reporter="a")
    assert notes(story, world) == ["new"]
    assert store.read < MANY / 10
    tell(store, Event(NOW_S, EventCode.JOB_STARTED, job_id, "newer"))
    assert notes(story, world) == ["newer"]


def test_an_empty_store_has_nothing_to_tell_and_what_comes_then_is_told() -> None:
    world, job_id = a_world()
    store = MemoryStore()
    story = Story(store, reporter="a")
    assert notes(story, world) == []
    tell(store, Event(NOW_S, EventCode.JOB_STARTED, job_id, "first"))
    assert notes(story, world) == ["first"]
