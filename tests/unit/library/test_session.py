"""The session: status, plan, notices and phases, in this process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.environment import RankEnvironment
from ebbtide.notice import FILE_PERIOD_S, NoticeAction
from ebbtide.rank_status import RankPhase, ReplanPhase
from ebbtide.session import Session
from scheduler.domain.parallel_plan import plan_from_json, plan_to_json
from scheduler.executors.rank_status import read_rank_status
from scheduler.trainer.layout import make_data_parallel_plan


def _status(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "status-0.json").read_text())
    return document


def test_session_does_not_import_torch_before_the_process_group() -> None:
    code = "import sys, ebbtide; ebbtide.Session.from_environment(); print('torch' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout.strip() == "False"


def test_object_store_is_a_url_and_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_CHECKPOINT_DIR", "s3://runs/a")
    with Session.from_environment() as session:
        assert session.checkpoint_url == "s3://runs/a"
        with pytest.raises(ValueError, match=r"s3://runs/a, an object store.*session\.checkpoint_url"):
            _ = session.checkpoint_dir
        session.succeed()


def test_without_executor_there_is_one_rank_and_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EBBTIDE_")]:
        monkeypatch.delenv(name)
    before = signal.getsignal(signal.SIGTERM)
    with Session.from_environment() as session:
        session.mark_resumed(0)
        assert (session.rank, session.world_size, session.steps_total) == (0, 1, 0)
        assert session.plan is None
        assert session.checkpoint_dir is None
        assert session.poll_notice() is None
        assert signal.getsignal(signal.SIGTERM) is before
        session.succeed()


def test_plan_is_read_from_its_file(tmp_path: Path) -> None:
    plan = make_data_parallel_plan(replicas=1, global_batch=8)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(plan)))
    document = Session(RankEnvironment(plan_path=path)).plan
    assert document is not None
    assert plan_from_json(document) == plan


@pytest.mark.parametrize(("text", "problem"), [(None, "No such file"), ("[]", "list"), ("{", "Expecting")])
def test_unreadable_plan_fails_the_rank_and_is_reported(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=problem) as error:
        Session(RankEnvironment(plan_path=path, run_dir=tmp_path))
    assert str(path) in str(error.value)
    assert _status(tmp_path)["phase"] == "failed"
    assert problem in _status(tmp_path)["reason"]


def test_frozen_layers_start_as_planned_and_never_decrease(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path, frozen_layers=4)) as session:
        assert (session.frozen_layers, session.status.frozen_layers) == (4, None)
        session.set_frozen_layers(7)
        session.mark_resumed(20)
        assert (session.frozen_layers, _status(tmp_path)["frozen_layers"]) == (7, 7)
        with pytest.raises(ValueError, match="`layers` is 5, but 7"):
            session.set_frozen_layers(5)
        session.leave()
    status = read_rank_status(tmp_path / "status-0.json")
    assert status is not None
    assert (status.phase, status.step, status.frozen_layers) == (RankPhase.LEFT, 20, 7)


def test_status_follows_a_training_that_leaves_on_request(tmp_path: Path) -> None:
    phases = []
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        phases.append(_status(tmp_path)["phase"])
        session.mark_resumed(20)
        phases.append(_status(tmp_path)["phase"])
        assert session.poll_notice() is None
        session.report(step=21, loss=2.5, samples_per_s=10.0)
        (tmp_path / "notice.json").write_text(json.dumps({"action": "leave", "step": None, "seconds_left": 9.0}))
        time.sleep(FILE_PERIOD_S)
        notice = session.poll_notice()
        assert notice is not None
        assert (notice.action, notice.seconds_left) == (NoticeAction.LEAVE, 9.0)
        with session.saving(21):
            phases.append(_status(tmp_path)["phase"])
        assert _status(tmp_path)["checkpoint_step"] == 21
        session.leave()
    assert [*phases, _status(tmp_path)["phase"]] == ["starting", "running", "saving", "left"]
    assert (_status(tmp_path)["step"], _status(tmp_path)["loss"]) == (21, 2.5)


def test_the_first_step_is_written_at_once(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(4)
        session.report(step=5)
        status = _status(tmp_path)  # without it, a rank that hangs now would count as one that still starts
        session.succeed()
    assert (status["step"], "first_step" in status["phases_s"]) == (5, True)


def test_sigterm_is_a_notice_to_leave(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
        os.kill(os.getpid(), signal.SIGTERM)
        notice = session.poll_notice()
        assert notice is not None
        assert notice.action is NoticeAction.LEAVE
        session.leave()


def test_checkpoint_request_is_returned_once(tmp_path: Path) -> None:
    (tmp_path / "notice.json").write_text(json.dumps({"action": "checkpoint", "step": 2}))
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
        notices = []
        for step in range(1, 5):
            session.report(step=step)
            notices.append(session.poll_notice())
        session.succeed()
    assert [notice is not None for notice in notices] == [False, True, False, False]


def test_exception_is_recorded_with_its_message_and_propagates(tmp_path: Path) -> None:
    def train() -> None:
        with Session(RankEnvironment(run_dir=tmp_path)) as session:
            session.mark_resumed(0)
            raise RuntimeError("no memory\nleft")

    with pytest.raises(RuntimeError, match="no memory"):
        train()
    assert (_status(tmp_path)["phase"], _status(tmp_path)["reason"]) == ("failed", "RuntimeError: no memory left")


def _exhaust_host_memory() -> None:
    bytearray(2**62)


def _exhaust_torch_memory() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def _exhaust_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _fail_otherwise() -> None:
    raise ValueError("no memory of that")


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (_exhaust_host_memory, "out-of-memory"),
        (_exhaust_torch_memory, "out-of-memory"),
        (_exhaust_gpu_memory, "out-of-memory"),
        (_fail_otherwise, None),
    ],
)
def test_out_of_memory_is_recorded_as_the_cause(tmp_path: Path, fail: Callable[[], None], cause: str | None) -> None:
    def train() -> None:
        with Session(RankEnvironment(run_dir=tmp_path)) as session:
            session.mark_resumed(0)
            fail()

    with pytest.raises((MemoryError, RuntimeError, ValueError)):
        train()
    assert (_status(tmp_path)["phase"], _status(tmp_path)["cause"]) == ("failed", cause)
    assert _status(tmp_path)["peak_bytes"] > 10**6


def test_peak_memory_is_part_of_the_status(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
        before = session.status.peak_bytes
        session.report(step=1)
        after = session.status.peak_bytes
        assert before is not None
        assert after is not None
        assert 10**6 < before <= after
        session.succeed()


def test_leaving_rank_records_the_seconds_of_every_phase(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.init_process_group()
        assert set(session.status.phases_s) == set()
        session.mark_resumed(20)
        assert set(session.status.phases_s) == {"start", "load"}
        session.report(step=21)
        with session.saving(21):
            time.sleep(0.05)
        assert set(session.status.phases_s) == {"start", "load", "first_step"}
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert session.poll_notice() is not None
        with session.saving(21):
            time.sleep(0.05)
        session.leave()
    phases_s = _status(tmp_path)["phases_s"]
    assert list(phases_s) == ["start", "load", "first_step", "notice", "save", "teardown"]
    assert phases_s["notice"] >= 0.05
    assert phases_s["save"] >= 0.05
    assert min(phases_s.values()) >= 0.0


def test_leaving_after_a_background_save_records_every_phase(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.init_process_group()
        session.mark_resumed(20)
        session.report(step=21)
        session.mark_saved(21)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert session.poll_notice() is not None
        session.leave()
    assert set(_status(tmp_path)["phases_s"]) == set(ReplanPhase)


def test_start_phase_counts_from_the_given_start_time() -> None:
    with Session(RankEnvironment(), started_at_s=time.monotonic() - 1000.0) as session:
        session.mark_resumed(0)
        assert session.status.phases_s["start"] >= 1000.0
        session.succeed()


def test_failed_checkpoint_is_not_recorded(tmp_path: Path) -> None:
    def train() -> None:
        with Session(RankEnvironment(run_dir=tmp_path)) as session:
            session.mark_resumed(3)
            session.report(step=4)
            with session.saving(4):
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        train()
    assert (_status(tmp_path)["phase"], _status(tmp_path)["checkpoint_step"]) == ("failed", 3)


def test_script_that_ends_without_a_final_call_has_failed(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
    assert _status(tmp_path)["phase"] == "failed"
    assert _status(tmp_path)["reason"]


def test_success_stands_when_the_teardown_fails(tmp_path: Path) -> None:
    def train() -> None:
        with Session(RankEnvironment(run_dir=tmp_path)) as session:
            session.mark_resumed(5)
            session.succeed()
            raise RuntimeError("gloo aborted")

    with pytest.raises(RuntimeError, match="gloo aborted"):
        train()
    assert _status(tmp_path)["phase"] == "succeeded"


def test_loss_that_is_not_a_number_is_reported_as_unknown(tmp_path: Path) -> None:
    with Session(replace(RankEnvironment(), run_dir=tmp_path)) as session:
        session.report(step=1, loss=float("nan"))
        session.succeed()
    assert _status(tmp_path)["loss"] is None
