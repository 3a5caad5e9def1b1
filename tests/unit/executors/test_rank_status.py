"""Parsing of rank statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.observation import FailureCause, RankPhase
from scheduler.executors.rank_status import read_rank_status


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "status-0.json"


def test_status_has_its_write_time(path: Path) -> None:
    path.write_text(
        json.dumps({"rank": 0, "pid": 7, "phase": "saving", "step": 12, "checkpoint_step": 10, "loss": 2, "more": 1})
    )
    status = read_rank_status(path)
    assert status is not None
    assert (status.phase, status.step, status.checkpoint_step, status.loss) == (RankPhase.SAVING, 12, 10, 2)
    assert status.written_at_ns == path.stat().st_mtime_ns
    assert not status.is_terminal
    assert not status.awaits_exit_code


def test_status_has_cause_memory_and_durations(path: Path) -> None:
    path.write_text(
        json.dumps(
            {
                "phase": "failed",
                "reason": "OutOfMemoryError",
                "cause": "out-of-memory",
                "peak_bytes": 700,
                "samples_per_s": 8,
                "phases_s": {"start": 4, "load": 0.5},
                "traffic": {"needed_bytes": 7, "read_bytes": 9, "moved_bytes": 8},
                "memory_events": "/sys/x",
                "oom_kills": 2,
            }
        )
    )
    status = read_rank_status(path)
    assert status is not None
    assert (status.cause, status.peak_bytes, status.samples_per_s) == (FailureCause.OUT_OF_MEMORY, 700, 8)
    assert status.phases_s == {"start": 4.0, "load": 0.5}
    assert status.traffic == LoadTraffic(needed_bytes=7, read_bytes=9, moved_bytes=8)
    assert (status.memory_events, status.oom_kills) == ("/sys/x", 2)


def test_missing_file_is_none(path: Path) -> None:
    assert read_rank_status(path) is None


@pytest.mark.parametrize(
    ("phase", "step", "begun"),
    [("starting", 0, False), ("running", 0, True), ("failed", 0, False), ("failed", 3, True), ("left", 0, True)],
)
def test_has_loaded_state(path: Path, phase: str, step: int, begun: bool) -> None:
    path.write_text(json.dumps({"phase": phase, "step": step}))
    status = read_rank_status(path)
    assert status is not None
    assert status.has_loaded_state is begun


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "got list"),
        ('{"phase": "flying"}', "phase is 'flying'"),
        ('{"phase": "running", "step": 1.5}', "step is 1.5"),
        ('{"phase": "running", "step": true}', "step is True"),
        ('{"phase": "running", "step": -1}', "step is -1"),
        ('{"phase": "running", "step": 1' + 400 * "0" + "}", "step is 10000"),
        ('{"phase": "running", "loss": NaN}', "loss is nan"),
        ('{"phase": "running", "loss": -Infinity}', "loss is -inf"),
        ('{"phase": "running", "phases_s": {"save": 1' + 400 * "0" + "}}", "save is 10000"),
        ('{"phase": "running", "checkpoint_step": "7"}', "checkpoint_step is '7'"),
        ('{"phase": "failed", "cause": "bad luck"}', "cause is 'bad luck'"),
        ('{"phase": "running", "phases_s": {"lunch": 1}}', "phases_s is {'lunch': 1}"),
        ('{"phase": "running", "phases_s": [1]}', "phases_s is [1]"),
        ('{"phase": "running", "phases_s": {"save": "1"}}', "save is '1'"),
        ('{"phase": "running", "peak_bytes": 1.5}', "peak_bytes is 1.5"),
        ('{"phase": "running", "traffic": {"lost_bytes": 1}}', "traffic is {'lost_bytes': 1}"),
        ('{"phase": "running", "traffic": {"read_bytes": "1"}}', "read_bytes is '1'"),
    ],
)
def test_malformed_status_is_rejected_with_file_and_field(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"status-0\.json") as refused:
        read_rank_status(path)
    assert message in str(refused.value)
