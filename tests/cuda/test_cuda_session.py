"""The session on a GPU: it waits for no kernel, costs a step nearly nothing, and its probe times the GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ebbtide.loss_reader import PERIOD_S, LossReader
from ebbtide.random_state import encode_random_state, restore_random_state
from ebbtide.speed_probe import WINDOW, SpeedProbe
from tests.cuda.trainer_runs import run_program

PROGRAM = "tests.cuda.session_step_rank"
OVERHEAD_MAX, OVERHEAD_GOAL = 0.01, 0.005
PROBE_OPERATIONS = 8 * 2 * 2048**3


def test_step_boundaries_never_wait_for_the_gpu(tmp_path: Path) -> None:
    found = run_program(PROGRAM, "synchronisation", EBBTIDE_RUN_DIR=str(tmp_path))
    assert found["step"] == 150
    assert found["loss"] is not None
    assert found["peak_bytes"] > 0


@pytest.mark.full
def test_session_adds_less_than_one_percent_to_a_step_of_20_ms(tmp_path: Path) -> None:
    """Run it alone: other work on the GPU changes the times."""
    found = run_program(PROGRAM, "overhead", EBBTIDE_RUN_DIR=str(tmp_path))
    goal = "below" if found["overhead"] < OVERHEAD_GOAL else "above"
    print(f"\nstep: {found['alone']} alone, {found['session']} with the session")
    print(f"overhead {found['overhead']:.3%}, {goal} the goal of {OVERHEAD_GOAL:.1%}")
    assert 5.0 < found["alone"]["median_ms"] < 80.0, found
    assert found["overhead"] < OVERHEAD_MAX, found


def test_probe_measures_the_speed_of_the_gpu() -> None:
    probe = SpeedProbe()
    for _ in range(WINDOW):
        probe.run("cuda:0")
        torch.cuda.synchronize()
    assert probe.median_s is not None
    speed_tflops = PROBE_OPERATIONS / probe.median_s / 1e12
    print(f"\nprobe: {probe.median_s * 1e3:.3f} ms, {speed_tflops:.0f} TFLOP/s in float16")
    assert 10.0 < speed_tflops < 3000.0


def test_probe_that_is_still_running_is_not_waited_for() -> None:
    probe = SpeedProbe()
    for _ in range(WINDOW - 1):
        probe.run("cuda:0")
        torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # torch's
    probe.run("cuda:0")
    assert probe.median_s is None
    torch.cuda.synchronize()
    assert probe.median_s is not None


def test_loss_is_read_once_the_gpu_has_it() -> None:
    reader = LossReader()
    reader.read(torch.ones((), device="cuda"))  # allocates its pinned memory, for which CUDA waits
    torch.cuda.synchronize()
    assert reader.read(torch.zeros((), device="cuda")) == 1.0
    time.sleep(PERIOD_S)
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # torch's
    loss = torch.full((1,), 1.5, device="cuda", dtype=torch.bfloat16)
    assert reader.read(loss) is None
    assert reader.read(loss) is None
    torch.cuda.synchronize()
    assert reader.read(loss) == 1.5
    assert reader.read(loss) is None


def test_random_state_of_the_gpu_is_restored() -> None:
    torch.rand(1, device="cuda")
    state = encode_random_state()
    drawn = torch.rand(4, device="cuda")
    restore_random_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
