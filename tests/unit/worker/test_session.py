import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.observation import RankPhase
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.executors.rank_status import read_rank_status
from scheduler.trainer.layout import make_data_parallel_plan
from scheduler.worker.environment import RankEnvironment
from scheduler.worker.notice import NoticeAction
from scheduler.worker.session import Session


def _status(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "status-0.json").read_text())
    return document


def test_a_session_needs_no_torch_before_the_group() -> None:
    code = "import sys, scheduler.worker.session as s; s.Session.from_environment(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "False"


def test_without_an_executor_there_is_one_rank_and_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_plan_is_read_from_its_file(tmp_path: Path) -> None:
    plan = make_data_parallel_plan(replicas=1, global_batch=8)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(plan)))
    assert Session(RankEnvironment(plan_path=path)).plan == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "plan.json cannot be read: No such file"), ("{}", "field 'stages' is missing"), ("{", "Expecting")],
)
def test_a_plan_that_cannot_be_read_fails_the_rank_with_the_reason(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Session(RankEnvironment(plan_path=path, run_dir=tmp_path))
    assert _status(tmp_path)["phase"] == "failed"
    assert message in _status(tmp_path)["reason"]


def test_frozen_layers_begin_where_the_plan_has_them_and_never_thaw(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path, frozen_layers=4)) as session:
        assert (session.frozen_layers, session.status.frozen_layers) == (4, None)
        session.set_frozen_layers(7)
        session.mark_resumed(20)
        assert (session.frozen_layers, _status(tmp_path)["frozen_layers"]) == (7, 7)
        with pytest.raises(ValueError, match="frozen layers: 5; it must be at least 7, which are frozen"):
            session.set_frozen_layers(5)
        session.leave()
    seen = read_rank_status(tmp_path / "status-0.json")
    assert seen is not None
    assert (seen.phase, seen.step, seen.frozen_layers) == (RankPhase.LEFT, 20, 7)


def test_the_status_follows_a_training_that_is_told_to_leave(tmp_path: Path) -> None:
    phases = []
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        phases.append(_status(tmp_path)["phase"])
        session.mark_resumed(20)
        phases.append(_status(tmp_path)["phase"])
        assert session.poll_notice() is None
        session.report(step=21, loss=2.5, samples_per_s=10.0)
        (tmp_path / "notice.json").write_text(json.dumps({"action": "leave", "step": None, "seconds_left": 9.0}))
        notice = session.poll_notice()
        assert notice is not None
        assert (notice.action, notice.seconds_left) == (NoticeAction.LEAVE, 9.0)
        with session.saving(21):
            phases.append(_status(tmp_path)["phase"])
        assert _status(tmp_path)["checkpoint_step"] == 21
        session.leave()
    assert [*phases, _status(tmp_path)["phase"]] == ["starting", "running", "saving", "left"]
    assert (_status(tmp_path)["step"], _status(tmp_path)["loss"]) == (21, 2.5)


def test_sigterm_is_a_notice_to_leave(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
        os.kill(os.getpid(), signal.SIGTERM)
        notice = session.poll_notice()
        assert notice is not None
        assert notice.action is NoticeAction.LEAVE
        session.leave()


def test_a_request_to_checkpoint_comes_once(tmp_path: Path) -> None:
    (tmp_path / "notice.json").write_text(json.dumps({"action": "checkpoint", "step": 2}))
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
        heard = []
        for step in range(1, 5):
            session.report(step=step)
            heard.append(session.poll_notice() is not None)
        session.succeed()
    assert heard == [False, True, False, False]


def test_a_failure_is_recorded_with_its_reason_and_goes_on(tmp_path: Path) -> None:
    def train() -> None:
        with Session(RankEnvironment(run_dir=tmp_path)) as session:
            session.mark_resumed(0)
            raise RuntimeError("no memory\nleft")

    with pytest.raises(RuntimeError, match="no memory"):
        train()
    assert (_status(tmp_path)["phase"], _status(tmp_path)["reason"]) == ("failed", "RuntimeError: no memory left")


RUNS_OUT = """
import sys
from pathlib import Path
from scheduler.worker.environment import RankEnvironment
from scheduler.worker.session import Session
with Session(RankEnvironment(run_dir=Path(sys.argv[1]))) as session:
    session.resumed(0)
    {error}
"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("bytearray(2**62)", "out-of-memory"),
        ("import torch; torch.empty(2**60, dtype=torch.uint8)", "out-of-memory"),
        (
            "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
            "out-of-memory",
        ),
        ("raise ValueError('no memory of that')", None),
    ],
)
def test_a_process_that_runs_out_of_memory_says_so(tmp_path: Path, error: str, cause: str | None) -> None:
    code = RUNS_OUT.format(error=error)
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=120)
    assert ran.returncode == 1
    assert (_status(tmp_path)["phase"], _status(tmp_path)["cause"]) == ("failed", cause)
    assert _status(tmp_path)["peak_bytes"] > 10**6


def test_memory_is_reported_while_it_runs(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
        before = session.status.peak_bytes
        session.report(step=1)
        after = session.status.peak_bytes
        assert before is not None
        assert after is not None
        assert 10**6 < before <= after
        session.succeed()


def test_a_rank_that_is_asked_to_leave_tells_how_long_each_part_took(tmp_path: Path) -> None:
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


def test_a_rank_that_leaves_at_a_step_that_is_saved_already_tells_every_phase_all_the_same(tmp_path: Path) -> None:
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


def test_a_process_that_was_there_before_counts_from_when_it_began_to_be_this_rank() -> None:
    with Session(RankEnvironment(), started_at_s=time.monotonic() - 1000.0) as session:
        session.mark_resumed(0)
        assert session.status.phases_s["start"] >= 1000.0
        session.succeed()


def test_a_checkpoint_that_fails_is_not_recorded(tmp_path: Path) -> None:
    def train() -> None:
        with Session(RankEnvironment(run_dir=tmp_path)) as session:
            session.mark_resumed(3)
            session.report(step=4)
            with session.saving(4):
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        train()
    assert (_status(tmp_path)["phase"], _status(tmp_path)["checkpoint_step"]) == ("failed", 3)


def test_a_script_that_just_ends_has_failed(tmp_path: Path) -> None:
    with Session(RankEnvironment(run_dir=tmp_path)) as session:
        session.mark_resumed(0)
    assert _status(tmp_path)["phase"] == "failed"
    assert "without leave() or succeed()" in _status(tmp_path)["reason"]


def test_what_was_reached_stays_when_the_teardown_fails(tmp_path: Path) -> None:
    def train() -> None:
        with Session(RankEnvironment(run_dir=tmp_path)) as session:
            session.mark_resumed(5)
            session.succeed()
            raise RuntimeError("gloo aborted")

    with pytest.raises(RuntimeError, match="gloo aborted"):
        train()
    assert _status(tmp_path)["phase"] == "succeeded"


def test_a_loss_that_is_no_number_is_reported_as_unknown(tmp_path: Path) -> None:
    with Session(replace(RankEnvironment(), run_dir=tmp_path)) as session:
        session.report(step=1, loss=float("nan"))
        session.succeed()
    assert _status(tmp_path)["loss"] is None
