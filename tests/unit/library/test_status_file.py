"""The status file of a rank, its memory readings and its phase timer."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebbtide.rank_status import RankPhase, ReplanPhase
from ebbtide.status_file import (
    OomKillCounter,
    PhaseTimer,
    StatusFile,
    is_out_of_memory,
    measure_peak_bytes,
    read_process_start_s,
)


def _read(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "status-3.json").read_text(encoding="utf-8"))
    return document


def test_status_file_holds_all_fields_from_the_start(tmp_path: Path) -> None:
    StatusFile(tmp_path, rank=3)
    counter = OomKillCounter.for_this_process()
    assert _read(tmp_path) == {
        "rank": 3,
        "pid": os.getpid(),
        "phase": "starting",
        "step": 0,
        "checkpoint_step": None,
        "loss": None,
        "samples_per_s": None,
        "reason": "",
        "cause": None,
        "peak_bytes": None,
        "phases_s": {},
        "memory_events": str(counter.path) if counter else "",
        "oom_kills": counter.read() if counter else None,
        "frozen_layers": None,
        "traffic": None,
        "probe_s": None,
        "awaits_exit_code": False,
    }


def test_quick_steps_are_written_at_a_limited_rate(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.RUNNING, step=1)
    written_at_ns = {(tmp_path / "status-3.json").stat().st_mtime_ns}
    for step in range(2, 200):
        file.update(step=step)
        written_at_ns.add((tmp_path / "status-3.json").stat().st_mtime_ns)
    assert file.status.step == 199
    assert len(written_at_ns) < 100


def test_phase_change_is_written_at_once_with_the_last_step(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.RUNNING, step=1)
    file.update(step=2)
    file.update(phase=RankPhase.LEFT)
    assert (_read(tmp_path)["phase"], _read(tmp_path)["step"]) == ("left", 2)


def test_update_in_a_terminal_phase_is_written_at_once(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.LEFT)
    file.update(phases_s={"teardown": 0.5})
    assert _read(tmp_path)["phases_s"] == {"teardown": 0.5}


def test_failed_write_is_logged_once_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StatusFile(tmp_path, rank=3)
    obstacle = tmp_path / f".status-3.json.{os.getpid()}.part"
    obstacle.mkdir()
    for step in (1, 2):
        file.update(phase=RankPhase.RUNNING, checkpoint_step=step)
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match=obstacle.name):
        file.update(phase=RankPhase.LEFT)
    obstacle.rmdir()
    file.update()
    assert (_read(tmp_path)["phase"], _read(tmp_path)["checkpoint_step"]) == ("left", 2)


def test_missing_run_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        StatusFile(tmp_path / "missing", rank=3)


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, rank=3)
    file.update(phase=RankPhase.RUNNING)
    assert [path.name for path in tmp_path.iterdir()] == ["status-3.json"]


def test_without_a_directory_the_status_is_kept_in_memory() -> None:
    file = StatusFile(None, rank=0)
    file.update(phase=RankPhase.SUCCEEDED, step=5)
    assert file.status.step == 5


def _with_cause(cause: BaseException) -> BaseException:
    try:
        raise ValueError("the step failed") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), True),
        (dist.DistBackendError("NCCL error\nLast error:\nFailed to CUDA calloc async 608 bytes"), True),
        (dist.DistBackendError("NCCL error\nLast error:\nCuda failure 719 'unspecified launch failure'"), False),
        (_with_cause(MemoryError()), True),
        (RuntimeError("no memory of that"), False),
        (_with_cause(OSError("disk full")), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_peak_memory_of_a_gpu_is_what_torch_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    assert measure_peak_bytes() == 7


def test_peak_memory_stays_after_memory_is_freed() -> None:
    before = measure_peak_bytes()
    block = bytearray(b"x") * 40_000_000
    peak = measure_peak_bytes()
    del block
    assert before <= peak == measure_peak_bytes()
    assert peak >= 40_000_000


@pytest.mark.parametrize(
    ("groups", "file", "text", "kills"),
    [
        ("0::/job/worker\n", "job/worker/memory.events.local", "oom 1\noom_kill 2\n", 2),
        ("0::/job/worker\n", "job/worker/memory.events", "oom 1\noom_kill 3\n", 3),
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill 5\n", 5),
        ("4:memory:/job\n", "memory/job/memory.oom_control", "under_oom 0\n", None),
    ],
)
def test_oom_kills_are_read_from_the_own_control_group(
    tmp_path: Path, groups: str, file: str, text: str, kills: int | None
) -> None:
    cgroup_file, path = tmp_path / "cgroup", tmp_path / "root" / file
    cgroup_file.write_text(groups)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    counter = OomKillCounter.for_this_process(cgroup_file=cgroup_file, cgroup_root=tmp_path / "root")
    assert counter == OomKillCounter(path)
    assert counter is not None
    assert counter.read() == kills
    path.unlink()
    assert counter.read() is None


def test_without_control_groups_there_is_no_counter(tmp_path: Path) -> None:
    assert OomKillCounter.for_this_process(cgroup_file=tmp_path / "none", cgroup_root=tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert OomKillCounter.for_this_process(cgroup_file=tmp_path / "cgroup", cgroup_root=tmp_path) is None


def test_each_phase_is_measured_once_from_the_end_of_the_previous_one() -> None:
    timer = PhaseTimer(started_at_s=time.monotonic() - 7.0)
    timer.end_phase(ReplanPhase.START)
    first = timer.seconds_by_phase["start"]
    timer.end_phase(ReplanPhase.START)
    timer.end_phase(ReplanPhase.LOAD)
    assert timer.seconds_by_phase["start"] == first >= 7.0
    assert 0.0 <= timer.seconds_by_phase["load"] < 7.0


def test_only_the_first_notice_sets_the_notice_phase() -> None:
    timer = PhaseTimer(started_at_s=time.monotonic())
    timer.begin_leaving(0.5)
    timer.begin_leaving(9.0)
    timer.end_phase(ReplanPhase.SAVE)
    assert timer.seconds_by_phase["notice"] == 0.5
    assert timer.has_ended(ReplanPhase.SAVE)
    assert not timer.has_ended(ReplanPhase.TEARDOWN)


def test_restart_excludes_the_time_since_the_last_phase() -> None:
    timer = PhaseTimer(started_at_s=time.monotonic() - 7.0)
    timer.restart()
    timer.end_phase(ReplanPhase.TEARDOWN)
    assert timer.seconds_by_phase["teardown"] < 7.0


def test_process_start_is_in_the_past() -> None:
    assert read_process_start_s() < time.monotonic()
    assert PhaseTimer().seconds_by_phase == {}
