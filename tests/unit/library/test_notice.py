"""Notices: their sources, their order of urgency, and how often each is acted on."""

import json
import logging
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from ebbtide import notice as notices
from ebbtide.notice import (
    AgreementPace,
    CheckpointInterval,
    Notice,
    NoticeAction,
    NoticeFile,
    NoticeMonitor,
    TerminationSignal,
    build_notice_group,
    parse_notice,
    select_most_urgent,
)


class FakeSource:
    """A notice source under the test's control."""

    def __init__(self, notice: Notice | None = None) -> None:
        self.notice = notice

    def poll(self) -> Notice | None:
        return self.notice


def _write(path: Path, document: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document), encoding="utf-8")
    part.replace(path)


def test_leave_precedes_replan_and_replan_precedes_checkpoint() -> None:
    checkpoint, replan, leave = map(Notice, (NoticeAction.CHECKPOINT, NoticeAction.REPLAN, NoticeAction.LEAVE))
    assert select_most_urgent([checkpoint, leave, replan]) == leave
    assert select_most_urgent([checkpoint, replan]) == replan
    assert select_most_urgent([]) is None


def test_among_equal_actions_the_shortest_deadline_wins() -> None:
    urgent = Notice(NoticeAction.LEAVE, seconds_left=5.0)
    others = [Notice(NoticeAction.LEAVE), Notice(NoticeAction.LEAVE, seconds_left=60.0)]
    assert select_most_urgent([*others, urgent]) == urgent


def test_leave_and_replan_require_exit_and_checkpoint_does_not() -> None:
    assert {action: Notice(action).requires_exit for action in NoticeAction} == {
        NoticeAction.CHECKPOINT: False,
        NoticeAction.REPLAN: True,
        NoticeAction.LEAVE: True,
    }


def test_notice_for_a_later_step_is_not_due_before() -> None:
    monitor = NoticeMonitor([FakeSource(Notice(NoticeAction.LEAVE, step=8))])
    assert monitor.next_due(7) is None
    assert monitor.next_due(8) == Notice(NoticeAction.LEAVE, step=8)


def test_receive_time_of_a_file_is_bounded_by_the_polls_around_it(tmp_path: Path) -> None:
    path, started_at_s = tmp_path / "notice.json", time.monotonic()
    file = NoticeFile(path)
    _write(path, {"action": "leave"})
    os.utime(path, (0, 0))
    past = file.poll()
    assert past is not None
    assert past.received_at_s is not None
    assert started_at_s <= past.received_at_s <= time.monotonic()
    _write(path, {"action": "replan"})
    os.utime(path, (time.time() + 1000, time.time() + 1000))
    future, now_s = file.poll(), time.monotonic()
    assert future is not None
    assert future.received_at_s is not None
    assert past.received_at_s <= future.received_at_s <= now_s


def test_receive_time_of_a_signal_is_that_of_the_first_one() -> None:
    source = TerminationSignal()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        first = source.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        second = source.poll()
    finally:
        source.close()
    assert first is not None
    assert second is not None
    assert first.received_at_s == second.received_at_s is not None


@pytest.fixture
def _short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file with each poll."""
    monkeypatch.setattr(notices, "FILE_PERIOD_S", 0.0)


def test_file_is_looked_at_once_in_a_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    path = tmp_path / "notice.json"
    file = NoticeFile(path)
    assert file.poll() is None
    _write(path, {"action": "leave"})
    now_s += 0.9 * notices.FILE_PERIOD_S
    assert file.poll() is None
    now_s += 0.2 * notices.FILE_PERIOD_S
    first = file.poll()
    path.unlink()
    assert first is not None
    assert file.poll() is first


@pytest.mark.usefixtures("_short_period")
def test_file_is_polled_when_created_replaced_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    file = NoticeFile(path)
    assert file.poll() is None
    _write(path, {"action": "checkpoint", "step": None, "seconds_left": 30.0})
    first = file.poll()
    assert first is not None
    assert (first.action, first.step, first.seconds_left) == (NoticeAction.CHECKPOINT, None, 30.0)
    _write(path, {"action": "leave", "step": 4, "seconds_left": 2})
    second = file.poll()
    assert second is not None
    assert (second.action, second.step, second.seconds_left) == (NoticeAction.LEAVE, 4, 2.0)
    assert second.request_id != first.request_id
    path.unlink()
    assert file.poll() is None


@pytest.mark.usefixtures("_short_period")
def test_each_checkpoint_request_is_due_once(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    monitor = NoticeMonitor([NoticeFile(path)])
    _write(path, {"action": "checkpoint"})
    assert monitor.next_due(3) is not None
    monitor.acknowledge(3)
    assert monitor.next_due(4) is None
    _write(path, {"action": "checkpoint"})
    assert monitor.next_due(5) is not None


def test_acknowledging_keeps_later_requests_and_requests_to_leave() -> None:
    later, leave = FakeSource(Notice(NoticeAction.CHECKPOINT, step=9, request_id="a")), FakeSource()
    monitor = NoticeMonitor([later, leave])
    monitor.acknowledge(3)
    assert monitor.next_due(9) == later.notice
    leave.notice = Notice(NoticeAction.LEAVE, request_id="b")
    monitor.acknowledge(3)
    assert monitor.next_due(3) == leave.notice


def test_malformed_notice_file_is_logged_once_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notice.json"
    _write(path, {"action": "go"})
    file = NoticeFile(path)
    with caplog.at_level(logging.ERROR):
        assert file.poll() is None
        assert file.poll() is None
    [message] = [record.getMessage() for record in caplog.records]
    assert str(path) in message
    assert "'go'" in message


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (["leave"], "list"),
        ({}, "`action` is None"),
        ({"action": "go"}, "`action` is 'go'. .*checkpoint, replan, leave"),
        ({"action": "leave", "step": 1.5}, "`step` is 1.5"),
        ({"action": "leave", "step": True}, "`step` is True"),
        ({"action": "leave", "seconds_left": "soon"}, "`seconds_left` is 'soon'"),
        ({"action": "leave", "seconds_left": float("nan")}, "`seconds_left` is nan"),
    ],
)
def test_malformed_notice_is_rejected_with_its_field(document: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_notice(document)


def test_sigterm_is_a_notice_to_leave_until_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    termination = TerminationSignal()
    try:
        assert termination.poll() is None
        os.kill(os.getpid(), signal.SIGTERM)
        notice = termination.poll()
        assert notice is not None
        assert notice.action is NoticeAction.LEAVE
    finally:
        termination.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_checkpoint_is_due_once_per_interval_since_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    interval = CheckpointInterval(10.0)
    monitor = NoticeMonitor([interval])

    def is_due(at_s: float) -> bool:
        now_s[0] = at_s
        notice = monitor.next_due(step=1)
        monitor.acknowledge(step=1)
        return notice is not None

    assert [is_due(at_s) for at_s in (109.9, 110.0, 115.0, 120.0, 121.0)] == [False, True, False, True, False]
    interval.restart()
    assert [is_due(at_s) for at_s in (130.9, 131.0)] == [False, True]


def test_infinite_interval_is_never_due() -> None:
    assert CheckpointInterval(float("inf")).poll() is None


@pytest.mark.parametrize(("step_s", "boundaries"), [(0.015, 25), (0.12, 4), (0.001, 25), (3.0, 1)])
def test_ranks_agree_every_half_second_and_at_every_25th_boundary(
    monkeypatch: pytest.MonkeyPatch, step_s: float, boundaries: int
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pace, agreed = AgreementPace(), []
    for boundary in range(1, 82):
        now_s += step_s + 1e-6
        if pace.is_due():
            agreed.append(boundary)
            pace.restart(pace.propose())
    assert agreed[0] == 1
    assert {after - before for before, after in pairwise(agreed[1:])} == {boundaries}


@pytest.mark.parametrize(
    ("configuration", "made"),
    [("cuda:nccl", ["gloo"]), ("cpu:gloo,cuda:nccl", []), ("cpu:gloo,cuda:gloo", [])],
)
def test_ranks_agree_on_the_cpu_whatever_the_training_communicates_with(
    monkeypatch: pytest.MonkeyPatch, configuration: str, made: list[str]
) -> None:
    groups = list[str]()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: configuration)
    monkeypatch.setattr(dist, "new_group", lambda backend: groups.append(backend))
    build_notice_group()
    assert groups == made


def test_ranks_cannot_agree_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        build_notice_group()
