"""Simulations in SQLite and PostgreSQL, and the runner with real processes."""

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

TASK = SimulationTask("sim-a", "ada", 5.0, ("fifo", "ebbtide"), 7, 20, owner_id="token:ada")
FILES = SimulationFiles("job_id\n", "", "pools: []\n")
ROWS = "".join(f"j{at},{at * 60},{600 + 97 * (at % 31)},{1 + at % 8}\n" for at in range(20_000))
LONG = SimulationFiles(
    f"job_id,submit_time_s,duration_s,gpus\n{ROWS}",
    "",
    "pools: [{name: training, kind: training, nodes: 2, gpus_per_node: 8, gpu: a100-80g}]\n",
)
LIMITS = RunnerLimits(concurrent_max=1, memory_bytes=4 * 2**30, cpu_s=600, retention_s=1e9, poll_s=0.05)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqlSimulations]:
    url = f"sqlite:///{tmp_path}/simulations.sqlite"
    migrate(url)
    store = SqlStore(url)
    yield store.simulations
    store.close()


@pytest.fixture
def simulations(database_url: str) -> Iterator[SqlSimulations]:
    store = SqlStore(database_url)
    yield store.simulations
    store.close()


def state_of(simulations: SqlSimulations, task_id: str = "sim-a") -> TaskState:
    task = simulations.get_task(task_id)
    assert task is not None
    return task.state


def test_simulation_is_stored_with_its_files_and_listed_by_owner(simulations: SqlSimulations) -> None:
    simulations.create(TASK, FILES)
    simulations.create(replace(TASK, id="sim-b", owner_id="token:bob"), FILES)
    first, second = simulations.get_task("sim-a"), simulations.get_task("sim-b")
    assert first == replace(TASK, number=1)
    assert simulations.get_files("sim-a") == FILES
    assert simulations.list_tasks(limit=9) == (second, first)
    assert (
        simulations.list_tasks(limit=9, before=2) == simulations.list_tasks(limit=9, owner_id="token:ada") == (first,)
    )
    assert (simulations.count_live_tasks("token:ada"), simulations.count_live_tasks("token:eve")) == (1, 0)
    assert (simulations.get_task("sim-c"), simulations.get_files("sim-c"), simulations.get_report("sim-a")) == (
        None,
        None,
        None,
    )


def test_expired_claim_passes_to_another_runner(simulations: SqlSimulations) -> None:
    simulations.create(TASK, FILES)
    claimed = simulations.claim("first", now_s=10.0, until_s=20.0)
    assert claimed is not None
    assert (claimed.state, claimed.tries, claimed.started_at_s) == (TaskState.RUNNING, 1, 10.0)
    assert simulations.claim("second", now_s=19.0, until_s=30.0) is None
    assert simulations.renew_claim("sim-a", "first", until_s=25.0, playing="fifo", jobs_done=3)
    assert simulations.claim("second", now_s=24.0, until_s=30.0) is None
    again = simulations.claim("second", now_s=25.0, until_s=35.0)
    assert again is not None
    assert (again.tries, again.jobs_done, again.playing) == (2, 0, "")
    assert not simulations.renew_claim("sim-a", "first", until_s=40.0, playing="fifo", jobs_done=9)
    simulations.finish("sim-a", "first", {"seed": 1}, now_s=26.0)
    simulations.fail("sim-a", "first", now_s=26.0, reason="late", tries=1)
    assert simulations.get_task("sim-a") == again
    simulations.finish("sim-a", "second", {"seed": 7}, now_s=27.0)
    done = simulations.get_task("sim-a")
    assert done is not None
    assert (done.state, done.jobs_done, done.ended_at_s) == (TaskState.SUCCEEDED, 20, 27.0)
    assert simulations.get_report("sim-a") == {"seed": 7}


def test_oldest_simulation_is_claimed_first_and_requeued_ones_wait_again(simulations: SqlSimulations) -> None:
    for task_id in ("sim-a", "sim-b"):
        simulations.create(replace(TASK, id=task_id), FILES)
    assert [simulations.claim("me", now_s=1.0, until_s=9.0), simulations.claim("me", now_s=1.0, until_s=9.0)] == [
        simulations.get_task("sim-a"),
        simulations.get_task("sim-b"),
    ]
    simulations.requeue("sim-a", "me", reason="it died", counts_as_try=True)
    simulations.requeue("sim-b", "me", reason="stopped", counts_as_try=False)
    first, second = simulations.get_task("sim-a"), simulations.get_task("sim-b")
    assert first is not None
    assert second is not None
    assert [(each.state, each.tries, each.reason) for each in (first, second)] == [
        (TaskState.QUEUED, 1, "it died"),
        (TaskState.QUEUED, 0, "stopped"),
    ]


def test_cancelled_simulation_has_no_holder_and_ended_ones_do_not_change(simulations: SqlSimulations) -> None:
    simulations.create(TASK, FILES)
    simulations.claim("me", now_s=10.0, until_s=20.0)
    cancelled = simulations.cancel("sim-a", now_s=11.0)
    assert cancelled is not None
    assert (cancelled.state, cancelled.ended_at_s) == (TaskState.CANCELLED, 11.0)
    assert not simulations.renew_claim("sim-a", "me", until_s=30.0, playing="fifo", jobs_done=1)
    assert simulations.claim("me", now_s=99.0, until_s=120.0) is None
    assert simulations.cancel("sim-a", now_s=50.0) == cancelled
    assert simulations.cancel("sim-b", now_s=50.0) is None
    simulations.delete_ended(before_s=11.0)
    assert simulations.get_task("sim-a") == cancelled
    simulations.delete_ended(before_s=12.0)
    assert (simulations.get_task("sim-a"), simulations.get_files("sim-a")) == (None, None)


@contextmanager
def running_runner(simulations: SqlSimulations, limits: RunnerLimits = LIMITS) -> Iterator[None]:
    stop = threading.Event()
    runner = SimulationRunner(simulations, limits, holder="me", clock=RealClock())
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def list_simulation_processes() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if is_simulation_process(each)]


def is_simulation_process(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return "scheduler.simulator.simulation_process" in process.cmdline()
    return False


def test_simulation_fails_after_its_process_was_killed_three_times(sqlite: SqlSimulations) -> None:
    sqlite.create(replace(TASK, policies=("fifo",), jobs_total=20_000), LONG)

    def has_failed() -> bool:
        for process in list_simulation_processes():
            process.kill()
        return state_of(sqlite) is TaskState.FAILED

    with running_runner(sqlite):
        wait_for(has_failed, lambda: sqlite.get_task("sim-a"))
    failed = sqlite.get_task("sim-a")
    assert failed is not None
    assert failed.tries == 3
    assert "SIGKILL" in failed.reason


def test_stopped_runner_requeues_the_simulation_and_ends_its_process(sqlite: SqlSimulations) -> None:
    sqlite.create(replace(TASK, policies=("fifo",), jobs_total=20_000), LONG)
    with running_runner(sqlite):
        wait_for(lambda: list_simulation_processes() != [])
        (process,) = list_simulation_processes()
    assert not process.is_running()
    task = sqlite.get_task("sim-a")
    assert task is not None
    assert (task.state, task.tries) == (TaskState.QUEUED, 0)


@pytest.mark.parametrize(
    ("limits", "value"),
    [(replace(LIMITS, cpu_s=2), "2 s"), (replace(LIMITS, memory_bytes=200 * 2**20), "209715200 bytes")],
)
def test_simulation_beyond_a_limit_fails(sqlite: SqlSimulations, limits: RunnerLimits, value: str) -> None:
    sqlite.create(replace(TASK, policies=("fifo",), jobs_total=20_000), LONG)
    with running_runner(sqlite, limits):
        wait_for(lambda: state_of(sqlite) is TaskState.FAILED, lambda: sqlite.get_task("sim-a"))
    failed = sqlite.get_task("sim-a")
    assert failed is not None
    assert (failed.tries, value in failed.reason) == (1, True), failed.reason


def test_invalid_trace_fails_with_its_line(sqlite: SqlSimulations) -> None:
    invalid = replace(LONG, jobs="job_id,submit_time_s,duration_s,gpus,model,global_batch\na,0,60,1,nobody,8\n")
    sqlite.create(TASK, invalid)
    with running_runner(sqlite):
        wait_for(lambda: state_of(sqlite) is TaskState.FAILED, lambda: sqlite.get_task("sim-a"))
    failed = sqlite.get_task("sim-a")
    assert failed is not None
    assert failed.reason.startswith("jobs.csv line 2: model: ")
