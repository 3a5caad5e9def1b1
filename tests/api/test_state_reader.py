"""StateReader: never older than the request, and equal to a state computed from scratch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from api.state import StateReader
from scheduler.domain.commands import CancelJob, Command, CommandBody, SubmitJob
from scheduler.domain.job import Intent
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, LoadedState
from scheduler.store.sql_store import SqlStore
from tests.builders import a_spec
from tests.postgres_server import PostgresServer

NOW_S = 100.0


def _command(number: int, body: CommandBody) -> Command:
    return Command(f"c{number}", NOW_S, body)


def test_writes_of_other_processes_are_visible_at_once(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    ours, theirs = SqlStore(url), SqlStore(url)
    present = StateReader(ours)
    theirs.send(_command(1, SubmitJob("a", a_spec())))
    assert set(present.read(NOW_S).snapshot.jobs) == {"a"}
    theirs.send(_command(2, CancelJob("a")))
    ours.send(_command(3, SubmitJob("b", a_spec())))
    seen = present.read(NOW_S)
    assert (seen.snapshot.jobs["a"].intent, set(seen.snapshot.jobs)) == (Intent.CANCEL, {"a", "b"})
    jobs = {"a": seen.snapshot.jobs["a"]}
    theirs.commit(Commit(Snapshot(), Snapshot(1, NOW_S, jobs=jobs), 0, consumed_command_ids=("c1", "c2")))
    seen = present.read(NOW_S)
    assert (seen.committed.generation, set(seen.committed.jobs), set(seen.snapshot.jobs)) == (1, {"a"}, {"a", "b"})
    ours.close()
    theirs.close()


def test_incremental_reads_equal_a_full_read() -> None:
    store = MemoryStore()
    stepwise = StateReader(store)
    for number in range(40):
        body: CommandBody = SubmitJob(f"j{number}", a_spec()) if number % 3 else CancelJob(f"j{number - 1}")
        store.send(_command(number, body))
        if number % 4 == 3:
            shown = stepwise.read(NOW_S)
            taken = tuple(command.id for command in shown.applied[: number // 2])
            before, after = (
                shown.committed,
                StateReader(_FixedStore(shown.committed, shown.applied[: number // 2])).read(NOW_S),
            )
            snapshot = replace(after.snapshot, generation=before.generation + 1)
            store.commit(Commit(before, snapshot, epoch=0, consumed_command_ids=taken))
        assert stepwise.read(NOW_S) == StateReader(store).read(NOW_S)


class _FixedStore(MemoryStore):
    def __init__(self, snapshot: Snapshot, inbox: tuple[Command, ...]) -> None:
        super().__init__(snapshot)
        self._loaded = LoadedState(snapshot, inbox)

    def load(self) -> LoadedState:
        return self._loaded


def test_concurrent_requests_share_the_next_read() -> None:
    store = _SlowStore()
    present, seen = StateReader(store), list[set[str]]()
    first = _in_thread(lambda: present.read(NOW_S))
    store.has_begun.wait()
    store.send(_command(1, SubmitJob("a", a_spec())))  # after the first read fetched its state and before it returned
    others = [_in_thread(lambda: seen.append(set(present.read(NOW_S).snapshot.jobs))) for _ in range(8)]
    time.sleep(0.2)  # enough for most threads to have started
    store.may_end.set()
    for thread in (first, *others):
        thread.join()
    assert seen == [{"a"}] * 8
    assert 2 <= store.loads < 9


class _SlowStore(MemoryStore):
    """Its first read returns an outdated state."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def load(self) -> LoadedState:
        self.loads += 1
        loaded = super().load()
        self.has_begun.set()
        self.may_end.wait()
        return loaded


def _in_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run)
    thread.start()
    return thread
