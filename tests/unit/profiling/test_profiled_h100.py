"""Predictions of an H100's profile for a GPT of 1e9 weights, against its measured steps."""

from scheduler.profiling.profile_derivation import derive_profile
from scheduler.profiling.validation import compare_steps
from scheduler.solver.profiles.catalog import load_gpu
from tests.benchmarks.profiled_gpu import H100_FILE, read_profiled_gpu

MEDIAN_MAX = 0.10


def test_profile_of_an_h100_predicts_time_and_memory_of_a_model_that_it_was_not_fitted_to() -> None:
    base = load_gpu("h100-80g")
    device, figures = read_profiled_gpu(H100_FILE, memory_bytes=base.memory_bytes)
    derived = derive_profile(device, figures, base, base.gpu)
    validation = compare_steps(figures, derived.hardware, device)
    assert (len(derived.probes), len(validation.steps)) == (33, 36)
    assert validation.time.median <= MEDIAN_MAX
    assert validation.memory.median <= MEDIAN_MAX
