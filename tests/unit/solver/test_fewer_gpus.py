"""Plans on fewer GPUs than offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.fewer_gpus import search_offered_gpus
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import Infeasibility, SolveRequest
from scheduler.solver.search.plan_search import SearchOutcome, search_plan

A100 = load_gpu("a100-80g")


def request(gpus: int, batch: int, *, model: str = "gpt2", inter_bandwidth: float = 0.0) -> SolveRequest:
    gpu = replace(A100, inter_bandwidth_bytes_per_s=inter_bandwidth or A100.inter_bandwidth_bytes_per_s)
    return SolveRequest(load_model(model), (gpu,), GpuShape.packed("a100-80g", gpus, 8), batch)


def get_plan(outcome: SearchOutcome) -> ParallelPlan:
    assert isinstance(outcome.result, ParallelPlan)
    return outcome.result


@pytest.mark.parametrize(("gpus", "batch"), [(248, 96), (15, 64), (13, 31)])
def test_a_batch_that_all_gpus_cannot_share_is_planned_on_fewer(gpus: int, batch: int) -> None:
    asked = request(gpus, batch)
    assert isinstance(search_plan(asked).result, Infeasibility)
    outcome, used = search_offered_gpus(asked)
    assert get_plan(outcome).world_size == used.gpus < gpus
    assert outcome.remark
    assert outcome.full_shape_plan is None


def test_fewer_gpus_are_proposed_where_more_are_slower() -> None:
    asked = request(32, 64, inter_bandwidth=1e7)
    outcome, used = search_offered_gpus(asked)
    whole = get_plan(search_plan(asked))
    assert used.gpus < 32
    assert get_plan(outcome).iteration_time_s < whole.iteration_time_s
    assert outcome.full_shape_plan == whole


def test_all_gpus_are_used_where_they_are_faster() -> None:
    asked = request(32, 64, model="llama-2-7b")
    outcome, used = search_offered_gpus(asked)
    assert used is asked
    assert outcome.result == search_plan(asked).result
    assert not outcome.remark


def test_a_lack_of_memory_is_no_reason_for_fewer_gpus() -> None:
    asked = request(2, 64, model="llama-2-70b")
    outcome, used = search_offered_gpus(asked)
    assert used is asked
    assert isinstance(outcome.result, Infeasibility)
    assert outcome.result.constraint == "memory"


def test_shapes_of_two_gpu_models_are_left_to_the_search() -> None:
    shape = GpuShape((GpuGroup("a100-80g", 1, 8), GpuGroup("l4", 1, 7)))
    asked = SolveRequest(load_model("gpt2"), (A100, load_gpu("l4")), shape, 64)
    assert search_offered_gpus(asked) == (search_plan(asked), asked)
