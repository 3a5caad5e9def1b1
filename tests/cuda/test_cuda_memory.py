"""Memory of a GPU: a death of it is recognised, the peak is what torch reserves, and sharded starts stay small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.status_file import is_out_of_memory, measure_peak_bytes
from tests.cuda.trainer_runs import run_generation, run_program
from tests.e2e.rank_launcher import Training

TOO_LARGE_BATCH = 300_000
"""Samples of mini-gpt whose embeddings take 157 GB, so that the first of them fails at once."""
SMALL_BYTES = 96 << 20
"""Temporary buffers of an optimizer step or of the drawing of weights, beside the state."""


def test_a_batch_that_does_not_fit_ends_the_rank_as_out_of_memory(tmp_path: Path) -> None:
    training = Training(tmp_path, "mini-gpt", 2, ("--global-batch", str(TOO_LARGE_BATCH)))
    ended = run_generation(training, 1, on_gpu=True)
    assert ended.code == 1, ended.log
    assert (ended.status["phase"], ended.status["cause"]) == ("failed", "out-of-memory"), ended.log
    assert ended.status["reason"].startswith("OutOfMemoryError: CUDA out of memory"), ended.status
    assert ended.status["peak_bytes"] > TOO_LARGE_BATCH * 256 * 8


def test_error_of_the_allocator_is_recognised() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)


def test_peak_memory_is_what_torch_has_reserved_and_at_least_what_it_allocated() -> None:
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()
    assert measure_peak_bytes() == torch.cuda.max_memory_reserved()
    assert measure_peak_bytes() >= torch.cuda.max_memory_allocated() >= 64 << 20
    assert measure_peak_bytes() > torch.cuda.memory_reserved()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tensor", "cublas", "nccl"])
def test_failures_on_a_full_gpu_are_recognised(kind: str) -> None:
    """Run it alone: it takes all memory of the GPU."""
    found = run_program("tests.cuda.memory_exhaustion_rank", kind)
    print(f"\n{kind}: {found}")
    assert found["error"], "the call needed no memory"
    assert found["recognised"], found
    assert found["peak_bytes"] >= found["allocated_bytes"] > 0.5 * found["total_bytes"]


def test_one_rank_of_eight_never_holds_the_whole_model() -> None:
    found = run_program("tests.cuda.build_memory_rank", "sharded")
    share = found["whole_bytes"] / found["ranks"]
    print(f"\nsharded build: {found}")
    assert found["held_bytes"] < 1.3 * share + (4 << 20), found
    assert found["peak_bytes"] < 1.5 * share + (16 << 20), found
    assert found["peak_bytes"] < 0.5 * found["whole_bytes"], found


def test_one_rank_builds_weights_and_optimizer_without_a_second_copy() -> None:
    found = run_program("tests.cuda.build_memory_rank", "whole")
    print(f"\nwhole build: {found}")
    assert found["held_bytes"] >= found["whole_bytes"]
    assert found["peak_bytes"] < found["whole_bytes"] + SMALL_BYTES, found
    # Weights, gradients and two moments, as each step of the training has them.
    assert found["loading_peak_bytes"] < 4 * found["whole_bytes"] + SMALL_BYTES, found
