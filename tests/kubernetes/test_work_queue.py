"""WorkQueue: each key once, never in two workers, optionally delayed."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from random import Random

import pytest

from tests.kubernetes.work_queue import WorkQueue


class ManualClock:
    """A simulated clock."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hand() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(hand: ManualClock) -> WorkQueue[str]:
    return WorkQueue(base_s=1.0, cap_s=8.0, rng=Random(1), monotonic_s=hand)


def test_repeated_key_is_taken_once(queue: WorkQueue[str]) -> None:
    for key in ("a", "b", "a", "a"):
        queue.add(key)
    assert [queue.take(0), queue.take(0), queue.take(0)] == ["a", "b", None]


def test_key_added_during_work_is_requeued(queue: WorkQueue[str]) -> None:
    queue.add("a")
    assert queue.take(0) == "a"
    queue.add("a")
    queue.add("a")
    assert queue.take(0) is None
    queue.done("a")
    assert queue.take(0) == "a"
    queue.done("a")
    assert queue.take(0) is None


def test_delayed_key_keeps_its_earliest_time(queue: WorkQueue[str], hand: ManualClock) -> None:
    queue.add_after("a", 10)
    queue.add_after("a", 3)
    queue.add_after("a", 20)
    hand.now_s += 2.9
    assert len(queue) == 0
    hand.now_s += 0.2
    assert queue.take(0) == "a"
    queue.done("a")
    hand.now_s += 100
    assert queue.take(0) is None


def test_failures_back_off_up_to_the_cap(queue: WorkQueue[str]) -> None:
    pauses_s = [queue.add_failed("a") for _ in range(6)]
    for pause_s, full_s in zip(pauses_s, (1, 2, 4, 8, 8, 8), strict=True):
        assert full_s / 2 <= pause_s <= full_s
    assert queue.add_failed("b") <= 1
    queue.forget("a")
    assert queue.add_failed("a") <= 1


def test_get_blocks_until_add_or_close() -> None:
    queue: WorkQueue[str] = WorkQueue()
    taken: SimpleQueue[str | None] = SimpleQueue()

    def take_two() -> None:
        taken.put(queue.take(60))
        taken.put(queue.take(60))

    waiting = threading.Thread(target=take_two)
    waiting.start()
    queue.add_after("a", 0.01)
    assert taken.get(timeout=30) == "a"
    queue.close()
    assert taken.get(timeout=30) is None
    waiting.join(30)


def test_workers_never_share_a_key() -> None:
    queue: WorkQueue[int] = WorkQueue()
    held: set[int] = set()
    broken: list[int] = []
    worked = threading.Semaphore(0)

    def work() -> None:
        while (key := queue.take(30)) is not None:
            if key in held:
                broken.append(key)
            held.add(key)
            held.discard(key)
            queue.done(key)
            worked.release()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for number in range(2_000):
        queue.add(number % 3)
    assert worked.acquire(timeout=30)
    queue.close()
    for worker in workers:
        worker.join(30)
    assert broken == []
