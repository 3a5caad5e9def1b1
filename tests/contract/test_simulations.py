"""What is kept of simulations, in SQLite and in a real PostgreSQL, and what their player does with real processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from scheduler.domain.simulation_task import SimulationFiles, SimulationTask, TaskState
from scheduler.runtime.clock import RealClock
from scheduler.simulator.simulation_runner import RunnerLimits, SimulationRunner
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_simulations import SqlSimulations
from scheduler.store.sql_store import SqlStore
from tests.webhook_receiver import wait_for

TASK = SimulationTask("sim-a", "ada", 5.0, ("fifo", "ebbtide"), 7, 20)
FILES = SimulationFiles("job_id\n", "", "pools: []\n")
ROWS = "".join(f"j{at},{at * 60},{600 + 97 * (at % 31)},{1 + at % 8}\n" for at in range(20_000))
LONG = SimulationFiles(
    f"job_id,submit_time_s,duration_s,gpus\n{ROWS}",
    "",
    "pools: [{name: training, kind: training, nodes: 2, gpus_per_node: 8, gpu: a100-80g}]\n",
)
TERMS = RunnerLimits(concurrent_max=1, memory_bytes=4 * 2**30, cpu_s=600, retention_s=1e9, poll_s=0.05)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqlSimulations]:
    url = f"sqlite:///{tmp_path}/simulations.sqlite"
    migrate(url)
    store = SqlStore(url)
    yield store.simulations
    store.close()


@pytest.fixture
def kept(database_url: str) -> Iterator[SqlSimulations]:
    store = SqlStore(database_url)
    yield store.simulations
    store.close()


def state_of(kept: SqlSimulations, task_id: str = "sim-a") -> TaskState:
    task = kept.get_task(task_id)
    assert task is not None
    return task.state


def test_a_task_is_kept_with_its_files_and_listed_by_owner(kept: SqlSimulations) -> None:
    kept.create(TASK, FILES)
    kept.create(replace(TASK, id="sim-b", owner="bob"), FILES)
    first, second = kept.get_task("sim-a"), kept.get_task("sim-b")
    assert first == replace(TASK, number=1)
    assert kept.get_files("sim-a") == FILES
    assert kept.list_tasks(limit=9) == (second, first)
    assert kept.list_tasks(limit=9, before=2) == kept.list_tasks(limit=9, owner="ada") == (first,)
    assert (kept.count_live_tasks("ada"), kept.count_live_tasks("eve")) == (1, 0)
    assert (kept.get_task("sim-c"), kept.get_files("sim-c"), kept.get_report("sim-a")) == (None, None, None)


def test_one_plays_until_it_is_silent(kept: SqlSimulations) -> None:
    kept.create(TASK, FILES)
    claimed = kept.claim("first", now_s=10.0, until_s=20.0)
    assert claimed is not None
    assert (claimed.state, claimed.tries, claimed.started_at_s) == (TaskState.RUNNING, 1, 10.0)
    assert kept.claim("second", now_s=19.0, until_s=30.0) is None
    assert kept.renew_claim("sim-a", "first", until_s=25.0, playing="fifo", jobs_done=3)
    assert kept.claim("second", now_s=24.0, until_s=30.0) is None
    again = kept.claim("second", now_s=25.0, until_s=35.0)
    assert again is not None
    assert (again.tries, again.jobs_done, again.playing) == (2, 0, "")
    assert not kept.renew_claim("sim-a", "first", until_s=40.0, playing="fifo", jobs_done=9)
    kept.finish("sim-a", "first", {"seed": 1}, now_s=26.0)
    kept.fail("sim-a", "first", now_s=26.0, reason="late", tries=1)
    assert kept.get_task("sim-a") == again
    kept.finish("sim-a", "second", {"seed": 7}, now_s=27.0)
    done = kept.get_task("sim-a")
    assert done is not None
    assert (done.state, done.jobs_done, done.ended_at_s) == (TaskState.SUCCEEDED, 20, 27.0)
    assert kept.get_report("sim-a") == {"seed": 7}


def test_who_waits_longest_is_played_first_and_what_is_given_back_waits_again(kept: SqlSimulations) -> None:
    for task_id in ("sim-a", "sim-b"):
        kept.create(replace(TASK, id=task_id), FILES)
    assert [kept.claim("me", now_s=1.0, until_s=9.0), kept.claim("me", now_s=1.0, until_s=9.0)] == [
        kept.get_task("sim-a"),
        kept.get_task("sim-b"),
    ]
    kept.requeue("sim-a", "me", reason="it died", counts_as_try=True)
    kept.requeue("sim-b", "me", reason="stopped", counts_as_try=False)
    first, second = kept.get_task("sim-a"), kept.get_task("sim-b")
    assert first is not None
    assert second is not None
    assert [(each.state, each.tries, each.reason) for each in (first, second)] == [
        (TaskState.QUEUED, 1, "it died"),
        (TaskState.QUEUED, 0, "stopped"),
    ]


def test_a_cancelled_task_is_nobodys_and_an_ended_one_stays_as_it_is(kept: SqlSimulations) -> None:
    kept.create(TASK, FILES)
    kept.claim("me", now_s=10.0, until_s=20.0)
    cancelled = kept.cancel("sim-a", now_s=11.0)
    assert cancelled is not None
    assert (cancelled.state, cancelled.ended_at_s) == (TaskState.CANCELLED, 11.0)
    assert not kept.renew_claim("sim-a", "me", until_s=30.0, playing="fifo", jobs_done=1)
    assert kept.claim("me", now_s=99.0, until_s=120.0) is None
    assert kept.cancel("sim-a", now_s=50.0) == cancelled
    assert kept.cancel("sim-b", now_s=50.0) is None
    kept.delete_ended(before_s=11.0)
    assert kept.get_task("sim-a") == cancelled
    kept.delete_ended(before_s=12.0)
    assert (kept.get_task("sim-a"), kept.get_files("sim-a")) == (None, None)


@contextmanager
def played(kept: SqlSimulations, terms: RunnerLimits = TERMS) -> Iterator[None]:
    stop = threading.Event()
    runner = SimulationRunner(kept, terms, holder="me", clock=RealClock())
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def players() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if is_player(each)]


def is_player(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return "scheduler.simulator.simulation_process" in process.cmdline()
    return False


def test_a_task_whose_process_dies_each_time_fails_with_the_reason(sqlite: SqlSimulations) -> None:
    sqlite.create(replace(TASK, policies=("fifo",), jobs_total=20_000), LONG)

    def has_failed() -> bool:
        for player in players():
            player.kill()
        return state_of(sqlite) is TaskState.FAILED

    with played(sqlite):
        wait_for(has_failed, lambda: sqlite.get_task("sim-a"))
    failed = sqlite.get_task("sim-a")
    assert failed is not None
    assert failed.tries == 3
    assert failed.reason == "it was begun 3 times and never came to its end: its process ended with SIGKILL"


def test_a_stopped_service_gives_the_task_back_and_leaves_no_process(sqlite: SqlSimulations) -> None:
    sqlite.create(replace(TASK, policies=("fifo",), jobs_total=20_000), LONG)
    with played(sqlite):
        wait_for(lambda: players() != [])
        (player,) = players()
    assert not player.is_running()
    task = sqlite.get_task("sim-a")
    assert task is not None
    assert (task.state, task.tries, task.reason) == (TaskState.QUEUED, 0, "the service was stopped")


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (replace(TERMS, cpu_s=2), "more processor time than the 2 s that it may have"),
        (replace(TERMS, memory_bytes=200 * 2**20), "more memory than the 209715200 bytes that it may have"),
    ],
)
def test_a_task_that_takes_too_much_fails_with_the_reason(
    sqlite: SqlSimulations, terms: RunnerLimits, why: str
) -> None:
    sqlite.create(replace(TASK, policies=("fifo",), jobs_total=20_000), LONG)
    with played(sqlite, terms):
        wait_for(lambda: state_of(sqlite) is TaskState.FAILED, lambda: sqlite.get_task("sim-a"))
    failed = sqlite.get_task("sim-a")
    assert failed is not None
    assert (failed.tries, why in failed.reason) == (1, True), failed.reason


def test_a_trace_that_cannot_be_played_fails_with_the_place(sqlite: SqlSimulations) -> None:
    wrong = replace(LONG, jobs="job_id,submit_time_s,duration_s,gpus,model,global_batch\na,0,60,1,nobody,8\n")
    sqlite.create(TASK, wrong)
    with played(sqlite):
        wait_for(lambda: state_of(sqlite) is TaskState.FAILED, lambda: sqlite.get_task("sim-a"))
    failed = sqlite.get_task("sim-a")
    assert failed is not None
    assert failed.reason.startswith("jobs.csv line 2: model: got 'nobody'; allowed: ")
