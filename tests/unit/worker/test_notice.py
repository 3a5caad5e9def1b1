import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest

from scheduler.worker.notice import (
    CheckpointInterval,
    Notice,
    NoticeAction,
    NoticeFile,
    NoticeMonitor,
    TerminationSignal,
    parse_notice,
    select_most_urgent,
)


class Said:
    """A source that says what the test sets."""

    def __init__(self, notice: Notice | None = None) -> None:
        self.notice = notice

    def poll(self) -> Notice | None:
        return self.notice


def _put(path: Path, document: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document), encoding="utf-8")
    part.replace(path)


def test_leave_goes_before_replan_and_replan_before_checkpoint() -> None:
    checkpoint, replan, leave = (
        Notice(action) for action in (NoticeAction.CHECKPOINT, NoticeAction.REPLAN, NoticeAction.LEAVE)
    )
    assert select_most_urgent([checkpoint, leave, replan]) == leave
    assert select_most_urgent([checkpoint, replan]) == replan
    assert select_most_urgent([]) is None


def test_of_two_equal_requests_the_one_with_less_time_counts() -> None:
    soon = Notice(NoticeAction.LEAVE, seconds_left=5.0)
    assert select_most_urgent([Notice(NoticeAction.LEAVE), soon, Notice(NoticeAction.LEAVE, seconds_left=60.0)]) == soon


def test_leave_and_replan_leave_and_checkpoint_stays() -> None:
    assert [
        Notice(action).requires_exit for action in (NoticeAction.LEAVE, NoticeAction.REPLAN, NoticeAction.CHECKPOINT)
    ] == [True, True, False]


def test_a_notice_for_a_later_step_waits_for_it() -> None:
    board = NoticeMonitor([Said(Notice(NoticeAction.LEAVE, step=8))])
    assert board.next_due(7) is None
    assert board.next_due(8) == Notice(NoticeAction.LEAVE, step=8)


def test_a_file_waits_since_it_was_written_but_never_since_before_the_last_look_without_it(tmp_path: Path) -> None:
    path, began_s = tmp_path / "notice.json", time.monotonic()
    file = NoticeFile(path)
    _put(path, {"action": "leave"})
    os.utime(path, (0, 0))
    ancient = file.poll()
    assert ancient is not None
    assert ancient.received_at_s is not None
    assert began_s <= ancient.received_at_s <= time.monotonic()
    _put(path, {"action": "replan"})
    os.utime(path, (time.time() + 1000, time.time() + 1000))
    from_the_future, now_s = file.poll(), time.monotonic()
    assert from_the_future is not None
    assert from_the_future.received_at_s is not None
    assert ancient.received_at_s <= from_the_future.received_at_s <= now_s


def test_a_signal_waits_since_it_first_came() -> None:
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


def test_a_file_is_heard_when_it_appears_when_it_is_replaced_and_when_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    file = NoticeFile(path)
    assert file.poll() is None
    _put(path, {"action": "checkpoint", "step": None, "seconds_left": 30.0})
    first = file.poll()
    assert first is not None
    assert (first.action, first.step, first.seconds_left) == (NoticeAction.CHECKPOINT, None, 30.0)
    _put(path, {"action": "leave", "step": 4, "seconds_left": 2})
    second = file.poll()
    assert second is not None
    assert (second.action, second.step, second.seconds_left) == (NoticeAction.LEAVE, 4, 2.0)
    assert second.request_id != first.request_id
    path.unlink()
    assert file.poll() is None


def test_a_checkpoint_request_is_followed_once_and_the_next_one_again(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    board = NoticeMonitor([NoticeFile(path)])
    _put(path, {"action": "checkpoint"})
    assert board.next_due(3) is not None
    board.acknowledge(3)
    assert board.next_due(4) is None
    _put(path, {"action": "checkpoint"})
    assert board.next_due(5) is not None


def test_settling_leaves_later_requests_and_requests_to_leave_in_place() -> None:
    later, leave = Said(Notice(NoticeAction.CHECKPOINT, step=9, request_id="a")), Said()
    board = NoticeMonitor([later, leave])
    board.acknowledge(3)
    assert board.next_due(9) == later.notice
    leave.notice = Notice(NoticeAction.LEAVE, request_id="b")
    board.acknowledge(3)
    assert board.next_due(3) == leave.notice


def test_a_mistyped_notice_is_reported_and_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notice.json"
    _put(path, {"action": "go"})
    file = NoticeFile(path)
    with caplog.at_level(logging.ERROR):
        assert file.poll() is None
        assert file.poll() is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is not followed: notice: action is 'go', allowed are checkpoint, replan, leave"
    ]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (["leave"], "an object is needed, got list"),
        ({}, "action is None, allowed are checkpoint, replan, leave"),
        ({"action": "leave", "step": 1.5}, "step is 1.5, it must be a whole number or null"),
        ({"action": "leave", "step": True}, "step is True"),
        ({"action": "leave", "seconds_left": "soon"}, "seconds_left is 'soon', it must be a number or null"),
        ({"action": "leave", "seconds_left": float("nan")}, "seconds_left is nan"),
    ],
)
def test_a_malformed_notice_is_refused_by_its_field(document: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_notice(document)


def test_sigterm_means_leave_and_the_former_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    termination = TerminationSignal()
    try:
        assert termination.poll() is None
        os.kill(os.getpid(), signal.SIGTERM)
        heard = termination.poll()
        assert heard is not None
        assert heard.action is NoticeAction.LEAVE
    finally:
        termination.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpoint_is_asked_for_once_in_each_interval_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    interval = CheckpointInterval(10.0)
    board = NoticeMonitor([interval])

    def asked(at_s: float) -> bool:
        now_s[0] = at_s
        found = board.next_due(step=1)
        board.acknowledge(step=1)
        return found is not None

    assert [asked(at_s) for at_s in (109.9, 110.0, 115.0, 120.0, 121.0)] == [False, True, False, True, False]
    interval.restart()
    assert [asked(at_s) for at_s in (130.9, 131.0)] == [False, True]


def test_nobody_who_names_no_interval_is_asked() -> None:
    assert CheckpointInterval(float("inf")).poll() is None
