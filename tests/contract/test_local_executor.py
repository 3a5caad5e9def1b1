"""The contract of the local executor, with real processes that are tiny scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.status_file import OomKillCounter
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.job_records import FrozenLayers
from scheduler.domain.observation import FailureCause, Observation, RunPhase
from scheduler.domain.worker_token import issue_worker_token
from scheduler.executors.local_executor import LocalExecutor
from scheduler.executors.local_records import RunRootLockedError
from scheduler.executors.local_run import RunTimeouts, find_marked_processes
from scheduler.executors.rank_launch import RUN_DIR_VARIABLE
from scheduler.runtime.clock import ManualClock
from tests.contract.local_rig import RENDEZVOUS, desired, drive, moved, phases, rank_job, run_of

SECRET = b"0123456789abcdef"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def executor(tmp_path: Path, clock: ManualClock) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(
        tmp_path / "run",
        now=clock.now_s,
        url="http://127.0.0.1:1",
        secret=SECRET,
        rendezvous_command=RENDEZVOUS,
        preload=(),
    )
    yield executor
    executor.close(grace_s=0.0)
    assert not find_marked_processes(tmp_path / "run"), "nothing outlives the executor"
    assert not (tmp_path / "double").exists(), "no slot was ever used twice at once"


def test_job_runs_on_its_gpus_and_reports_progress(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0, 1)}, tmp_path)
    seen = drive(executor, desired(3, job), lambda seen: phases(seen) == {("a", 1): "running"})
    run = run_of(seen, "a")
    assert (run.gpus, run.steps, run.loss, run.checkpoint_steps) == ({"t0": (0, 1)}, 5.0, 2.5, None)
    assert (seen.at_s, seen.converged_generation) == (1000.0, 3)
    folder = tmp_path / "run/jobs/a/gen-1"
    record = json.loads((folder / "started.json").read_text())
    assert (record["gpus"], record["world_size"], record["snapshot_generation"]) == ({"t0": [0, 1]}, 2, 3)
    assert json.loads((folder / "plan.json").read_text())["stages"][0]["gpus"] == 2


def test_rank_gets_slot_token_and_log(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (1,)}, tmp_path)
    words = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'EBBTIDE_TOKEN', 'EBBTIDE_URL')))"
    job = replace(job, spec=replace(job.spec, command=("python", "-c", words)))
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "succeeded"})
    log = (tmp_path / "run/jobs/a/gen-1/rank-0.log").read_text()
    assert log.split() == ["0", "0", issue_worker_token(SECRET, "a", 1), "http://127.0.0.1:1"]


def test_next_generation_starts_after_the_run_left(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0, 1)}, tmp_path, SAVE_S="0.2")
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    smaller = moved(job, {"t0": (0,)}, leave_by_s=1060.0, folder=tmp_path)
    executor.converge(desired(2, smaller))
    assert phases(executor.observe()) == {("a", 1): "leaving"}
    notice = json.loads((tmp_path / "run/jobs/a/gen-1/notice.json").read_text())
    assert notice == {"action": "replan", "step": None, "seconds_left": 60.0}
    seen = drive(executor, desired(2, smaller), lambda seen: phases(seen).get(("a", 2)) == "running")
    old = run_of(seen, "a", 1)
    assert (old.phase, old.gpus, old.steps, old.checkpoint_steps) == (RunPhase.LEFT, {}, 7.0, 7.0)
    executor.converge(desired(3, smaller))
    assert phases(executor.observe()) == {("a", 2): "running"}, "a committed state has taken the old run in"


def test_abort_during_teardown_does_not_fail_the_run(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0,)}, tmp_path, ABORT="1")
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    away = moved(job, {}, leave_by_s=1060.0, folder=tmp_path)
    drive(executor, desired(2, away), lambda seen: phases(seen) == {("a", 1): "left"})
    notice = json.loads((tmp_path / "run/jobs/a/gen-1/notice.json").read_text())
    assert notice["action"] == "leave"


def test_failed_notice_write_is_retried_without_delaying_others(
    executor: LocalExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [rank_job(job_id, "obey", {"t0": (gpu,)}, tmp_path) for gpu, job_id in enumerate("ab")]
    drive(executor, desired(1, *jobs), lambda seen: set(phases(seen).values()) == {"running"})
    away = desired(2, *(moved(job, {}, leave_by_s=1060.0, folder=tmp_path) for job in jobs))
    in_the_way = tmp_path / "run/jobs/a/gen-1/.notice.json.part"
    in_the_way.mkdir()
    drive(executor, away, lambda seen: phases(seen) == {("a", 1): "leaving", ("b", 1): "left"})
    assert caplog.text.count("notice to a generation 1") == 1
    in_the_way.rmdir()
    drive(executor, away, lambda seen: phases(seen)["a", 1] == "left")


def test_deadline_applies_without_a_written_notice(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    job = rank_job("a", "obey", {"t0": (0,)}, tmp_path)
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    (tmp_path / "run/jobs/a/gen-1/.notice.json.part").mkdir()
    away = desired(2, moved(job, {}, leave_by_s=1060.0, folder=tmp_path))
    executor.converge(away)
    clock.move_to(1060.0)
    drive(executor, away, lambda seen: phases(seen) == {("a", 1): "lost"})


def test_unwritable_outcome_is_reported_once_written(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0,)}, tmp_path)
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    in_the_way = tmp_path / "run/jobs/a/gen-1/.ended.json.part"
    in_the_way.mkdir()
    away = desired(2, moved(job, {}, leave_by_s=1060.0, folder=tmp_path))
    drive(executor, away, lambda seen: executor.has_pending_changes() and run_of(seen, "a").gpus == {})
    assert phases(executor.observe()) == {("a", 1): "leaving"}
    in_the_way.rmdir()
    drive(executor, away, lambda seen: phases(seen) == {("a", 1): "left"})


def test_start_is_deferred_while_the_disk_is_full(executor: LocalExecutor, tmp_path: Path) -> None:
    jobs = [rank_job(job_id, "obey", {"t0": (gpu,)}, tmp_path) for gpu, job_id in enumerate("ab")]
    (tmp_path / "run/jobs/a").mkdir(parents=True)
    in_the_way = tmp_path / "run/jobs/a/.gen-1.part"
    in_the_way.touch()
    drive(executor, desired(1, *jobs), lambda seen: phases(seen) == {("b", 1): "running"})
    in_the_way.unlink()
    drive(executor, desired(1, *jobs), lambda seen: phases(seen) == {("a", 1): "running", ("b", 1): "running"})


def test_run_that_stays_is_killed_at_its_deadline(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    job = rank_job("a", "ignore_notices", {"t0": (0,), "i0": (2,)}, tmp_path)
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    away = desired(2, moved(job, {}, leave_by_s=1060.0, folder=tmp_path))
    executor.converge(away)
    clock.move_to(1059.9)
    executor.converge(away)
    assert run_of(executor.observe(), "a").gpus == {"t0": (0,), "i0": (2,)}, "occupied until the processes are gone"
    clock.move_to(1060.0)
    run = run_of(drive(executor, away, lambda seen: phases(seen) == {("a", 1): "lost"}), "a")
    assert (run.gpus, run.steps, run.checkpoint_steps) == ({}, 5.0, 3.0)
    assert run.reason == "it was killed at its deadline"


def test_second_recall_moves_the_deadline(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    job = rank_job("a", "ignore_notices", {"t0": (0,)}, tmp_path)
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    first = moved(job, {}, leave_by_s=1060.0, folder=tmp_path)
    executor.converge(desired(2, first))
    clock.move_to(1010.0)
    executor.converge(desired(3, moved(first, {}, leave_by_s=1030.0, folder=tmp_path)))
    notice = json.loads((tmp_path / "run/jobs/a/gen-1/notice.json").read_text())
    assert notice["seconds_left"] == 20.0


def test_success_is_reported_until_the_job_is_gone(executor: LocalExecutor, tmp_path: Path) -> None:
    state = desired(1, rank_job("a", "finish", {"t0": (0, 1)}, tmp_path))
    run = run_of(drive(executor, state, lambda seen: phases(seen) == {("a", 1): "succeeded"}), "a")
    assert (run.gpus, run.steps, run.checkpoint_steps, run.loss) == ({}, 10.0, 10.0, 1.5)
    executor.converge(replace(state, generation=2))
    assert phases(executor.observe()) == {("a", 1): "succeeded"}, "the desired state has not moved on"
    executor.converge(desired(3))
    assert executor.observe().runs == ()


def test_ranks_outliving_the_final_status_are_killed(
    executor: LocalExecutor, tmp_path: Path, clock: ManualClock
) -> None:
    state = desired(1, rank_job("a", "finish", {"t0": (0,)}, tmp_path, LINGER="1"))
    status = tmp_path / "run/jobs/a/gen-1/status-0.json"
    drive(executor, state, lambda seen: status.exists() and "succeeded" in status.read_text())
    assert run_of(executor.observe(), "a").gpus == {"t0": (0,)}
    clock.move_to(1000.0 + RunTimeouts().teardown_s)
    drive(executor, state, lambda seen: phases(seen) == {("a", 1): "succeeded"})


def test_rank_out_of_memory_is_the_cause(executor: LocalExecutor, tmp_path: Path) -> None:
    state = desired(1, rank_job("a", "run_out_of_memory", {"t0": (0, 1)}, tmp_path))
    run = run_of(drive(executor, state, lambda seen: phases(seen) == {("a", 1): "failed"}), "a")
    assert (run.cause, run.peak_bytes) == (FailureCause.OUT_OF_MEMORY, 900)


def test_frozen_layers_are_passed_and_reported(executor: LocalExecutor, tmp_path: Path) -> None:
    job = replace(rank_job("a", "freeze", {"t0": (0, 1)}, tmp_path), freezing=FrozenLayers(layers=4))
    seen = drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    assert run_of(seen, "a").frozen_layers == 5


@pytest.mark.parametrize("risen", [True, False])
def test_sigkill_is_oom_only_if_the_kernel_counted_it(executor: LocalExecutor, tmp_path: Path, risen: bool) -> None:
    """Reads the kernel's file of this control group; the rank's earlier count is simulated."""
    kills = OomKillCounter.for_this_process()
    if kills is None or (count := kills.read()) is None:
        pytest.skip("this system does not count whom it kills for memory")
    reported = {"MEMORY_EVENTS": str(kills.path), "OOM_KILLS": str(count - risen)}
    state = desired(1, rank_job("a", "be_killed", {"t0": (0,)}, tmp_path, **reported))
    run = run_of(drive(executor, state, lambda seen: phases(seen) == {("a", 1): "failed"}), "a")
    assert run.reason == "rank 0 was killed by SIGKILL"
    assert run.cause is (FailureCause.OUT_OF_MEMORY if risen else None)


def test_crash_of_one_rank_kills_the_others(executor: LocalExecutor, tmp_path: Path) -> None:
    state = desired(1, rank_job("a", "crash", {"t0": (0, 1, 2)}, tmp_path))
    run = run_of(drive(executor, state, lambda seen: phases(seen) == {("a", 1): "failed"}), "a")
    assert run.reason == "rank 1 exited with code 3: CUDA error: out of slots"
    assert run.gpus == {}
    assert not (tmp_path / "run/jobs/a/gen-2").exists()


@pytest.mark.parametrize("own_group", ["", "1"])
def test_run_ends_with_its_last_process(executor: LocalExecutor, tmp_path: Path, own_group: str) -> None:
    state = desired(1, rank_job("a", "parent", {"t0": (0, 1)}, tmp_path, OWN_GROUP=own_group))
    drive(executor, state, lambda seen: phases(seen) == {("a", 1): "failed"})
    assert not find_marked_processes(tmp_path / "run/jobs/a/gen-1", variable=RUN_DIR_VARIABLE)


def test_reported_failure_is_the_reason(executor: LocalExecutor, tmp_path: Path) -> None:
    state = desired(1, rank_job("a", "fail", {"t0": (0,)}, tmp_path))
    run = run_of(drive(executor, state, lambda seen: phases(seen) == {("a", 1): "failed"}), "a")
    assert run.reason == "rank 0: ValueError: the plan is for another model"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((), "command"),
        (("/no/such/program",), "rank 0 cannot be started: [Errno 2] No such file or directory: '/no/such/program'"),
    ],
)
def test_start_failure_fails_the_run(
    executor: LocalExecutor, tmp_path: Path, command: tuple[str, ...], reason: str
) -> None:
    job = rank_job("a", "obey", {"t0": (0,)}, tmp_path)
    state = desired(1, replace(job, spec=replace(job.spec, command=command)))
    run = run_of(drive(executor, state, lambda seen: phases(seen) == {("a", 1): "failed"}), "a")
    assert reason in run.reason


@pytest.mark.parametrize(
    ("command", "fault", "last_words"),
    [
        (("python", "no_such_file.py"), PermanentFault.FILE_NOT_FOUND, "No such file or directory"),
        (("python", "-c", "import no_such_module"), PermanentFault.IMPORT_ERROR, "No module named 'no_such_module'"),
        (("python", "-c", "raise ValueError('try again')"), None, "ValueError: try again"),
    ],
)
def test_failure_tells_whether_a_retry_can_help(
    executor: LocalExecutor, tmp_path: Path, command: tuple[str, ...], fault: PermanentFault | None, last_words: str
) -> None:
    job = rank_job("a", "obey", {"t0": (0,)}, tmp_path)
    state = desired(1, replace(job, spec=replace(job.spec, command=command)))
    run = run_of(drive(executor, state, lambda seen: phases(seen) == {("a", 1): "failed"}), "a")
    assert (run.permanent_fault, run.ran_s is not None) == (fault, True)
    assert last_words in run.reason


def test_silent_script_is_judged_by_its_exit_code(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    quiet = rank_job("quiet", "stay_silent", {"t0": (0,)}, tmp_path)
    state = desired(1, quiet, rank_job("done", "finish_silently", {"t0": (1,)}, tmp_path))
    expected = {("quiet", 1): "starting", ("done", 1): "succeeded"}
    drive(executor, state, lambda seen: phases(seen) == expected)

    def has_patience_ended(seen: Observation) -> bool:
        # The timeout starts when the agent reports the start, which may be later than now.
        clock.move_to(clock.now_s() + RunTimeouts().status_s)
        return run_of(seen, "quiet").phase is RunPhase.RUNNING

    drive(executor, state, has_patience_ended)
    away = desired(2, moved(quiet, {}, leave_by_s=clock.now_s() + 1e6, folder=tmp_path))
    run = run_of(drive(executor, away, lambda seen: phases(seen).get(("quiet", 1)) == "lost"), "quiet")
    assert "SIGTERM" in run.reason


def test_occupied_gpus_are_not_reused(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    first = rank_job("a", "ignore_notices", {"t0": (0,)}, tmp_path)
    drive(executor, desired(1, first), lambda seen: phases(seen) == {("a", 1): "running"})
    second = rank_job("b", "obey", {"t0": (0,)}, tmp_path)
    state = desired(2, moved(first, {}, leave_by_s=1060.0, folder=tmp_path), second)
    executor.converge(state)
    assert phases(executor.observe()) == {("a", 1): "leaving"}
    clock.move_to(1060.0)
    drive(executor, state, lambda seen: phases(seen) == {("a", 1): "lost", ("b", 1): "running"})


def test_generation_begins_once(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    job = rank_job("a", "ignore_notices", {"t0": (0,)}, tmp_path)
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    drive(executor, desired(2), lambda seen: not seen.runs)
    run = run_of(drive(executor, desired(3, job), lambda seen: bool(seen.runs)), "a")
    assert (run.phase, run.reason) == (RunPhase.LOST, "its job is gone")


def test_older_state_is_ignored(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0,)}, tmp_path)
    drive(executor, desired(5, job), lambda seen: phases(seen) == {("a", 1): "running"})
    executor.converge(desired(4))
    seen = executor.observe()
    assert (phases(seen), seen.converged_generation) == ({("a", 1): "running"}, 5)


def test_failed_node_loses_its_runs_until_restored(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0,), "i1": (0,)}, tmp_path)
    drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "running"})
    executor.fail_node("i1")
    seen = drive(executor, desired(1, job), lambda seen: phases(seen) == {("a", 1): "lost"})
    assert run_of(seen, "a").reason == "node i1 went down"
    assert {name: facts.up for name, facts in seen.nodes.items()} == {"t0": True, "t1": True, "i0": True, "i1": False}
    again = desired(2, moved(job, {"i1": (0,)}, leave_by_s=1000.0, folder=tmp_path))
    executor.converge(again)
    executor.converge(again)
    assert ("a", 2) not in phases(executor.observe())
    executor.restore_node("i1")
    drive(executor, again, lambda seen: phases(seen).get(("a", 2)) == "running")
    with pytest.raises(ValueError, match=r"x9.*i0, i1, t0, t1"):
        executor.fail_node("x9")


def test_close_lets_ranks_save_and_leaves_no_process(tmp_path: Path, clock: ManualClock) -> None:
    executor = LocalExecutor(tmp_path / "run", now=clock.now_s, rendezvous_command=RENDEZVOUS, preload=())
    jobs = [
        rank_job("good", "spawn_child", {"t0": (0, 1)}, tmp_path),
        rank_job("bad", "ignore_notices", {"t0": (2,)}, tmp_path),
    ]
    running = {("good", 1): "running", ("bad", 1): "running"}
    drive(executor, desired(1, *jobs), lambda seen: phases(seen) == running)
    executor.close(grace_s=0.5)
    executor.close(grace_s=0.5)
    assert not find_marked_processes(tmp_path / "run")
    after = LocalExecutor(tmp_path / "run", now=clock.now_s, rendezvous_command=RENDEZVOUS, preload=())
    assert phases(after.observe()) == {("bad", 1): "lost", ("good", 1): "left"}
    after.close(grace_s=0.0)


def test_run_root_is_exclusive(executor: LocalExecutor, tmp_path: Path) -> None:
    drive(executor, desired(1), lambda seen: seen.converged_generation == 1)
    other = (
        "import sys, time; from pathlib import Path; from scheduler.executors.local_executor import LocalExecutor\n"
        "LocalExecutor(Path(sys.argv[1]), now=time.time).observe()"
    )
    run = subprocess.run([sys.executable, "-c", other, str(tmp_path / "run")], capture_output=True, text=True)
    assert run.returncode != 0
    assert RunRootLockedError.__name__ in run.stderr
    assert "in use by the controller" in run.stderr


@pytest.mark.e2e
def test_rendezvous_store_lives_from_the_first_job_to_close(tmp_path: Path, clock: ManualClock) -> None:
    executor = LocalExecutor(tmp_path / "run", now=clock.now_s)
    executor.converge(desired(1))
    assert not (tmp_path / "run/rendezvous.log").exists()
    state = desired(2, rank_job("a", "obey", {"t0": (0,)}, tmp_path))
    limit_s = time.monotonic() + 60.0
    while phases(executor.observe()) != {("a", 1): "running"}:
        assert time.monotonic() < limit_s, (tmp_path / "run/rendezvous.log").read_text()
        executor.converge(state)
        time.sleep(0.05)
    executor.close(grace_s=5.0)
    assert not find_marked_processes(tmp_path / "run")
