"""Profiles from measurements: hidden constants are found, and a validation names the term that is off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.profiling.profile_derivation import derive_profile
from scheduler.profiling.task_lists import (
    ACCELERATOR,
    PROCESSOR,
    list_collective_tasks,
    list_kernel_tasks,
    list_probe_tasks,
    list_validation_tasks,
    spread_out,
)
from scheduler.profiling.tasks import GemmTask, StepTask
from scheduler.profiling.validation import compare_steps, select_feasible
from scheduler.solver.calibration.hardware_constants import format_gpu_document
from scheduler.solver.profiles.catalog import load_gpu, parse_gpu
from scheduler.solver.profiles.hardware_profile import Collective, HardwareProfile, Precision
from tests.unit.profiling.simulated_device import CONTEXT_BYTES, describe, measure

BASE = load_gpu("h100-80g")
HIDDEN = replace(
    BASE,
    efficiency=0.62,
    attention_efficiency=0.4,
    memory_bandwidth_bytes_per_s=1.4e12,
    launch_s=3e-4,
    iteration_overhead_s=0.002,
)
KERNELS = list_kernel_tasks(ACCELERATOR, has_host_link=True)
PROBES = list_probe_tasks(ACCELERATOR, 1)


def test_hidden_constants_of_a_device_are_found() -> None:
    derived = derive_profile(describe(HIDDEN), measure([*KERNELS, *PROBES], HIDDEN), BASE, "mine")
    found = derived.hardware
    for name in ("efficiency", "attention_efficiency", "memory_bandwidth_bytes_per_s", "launch_s"):
        assert getattr(found, name) == pytest.approx(getattr(HIDDEN, name), rel=0.03), name
    assert (found.gpu, found.reserve_bytes, found.host_bandwidth_bytes_per_s) == ("mine", CONTEXT_BYTES, 25e9)
    assert found.reserve_ratio == pytest.approx(0.1, abs=0.02)
    assert found.inter_bandwidth_bytes_per_s == BASE.inter_bandwidth_bytes_per_s
    assert derived.fit is not None
    assert len(derived.probes) == len(PROBES)


def test_without_probes_the_figures_of_kernels_stand() -> None:
    derived = derive_profile(describe(HIDDEN), measure(KERNELS, HIDDEN), BASE, "mine")
    assert derived.hardware.efficiency == pytest.approx(HIDDEN.efficiency, rel=1e-6)
    assert (derived.fit, derived.probes) == (None, ())


def test_segments_that_fill_little_of_small_models_do_not_raise_the_reserve_of_large_ones() -> None:
    segments = 512 << 20
    figures = {
        task: {**values, "peak_bytes": values["allocated_bytes"] + segments} if "peak_bytes" in values else values
        for task, values in measure([*KERNELS, *PROBES], HIDDEN).items()
    }
    derived = derive_profile(describe(HIDDEN), figures, BASE, "mine")
    planned = sorted(values["allocated_bytes"] for values in figures.values() if "allocated_bytes" in values)
    assert derived.hardware.reserve_ratio < segments / (planned[-1] / 2)
    assert derived.hardware.reserve_ratio < segments / planned[len(planned) // 2] / 2


def test_a_device_without_a_product_has_no_profile() -> None:
    with pytest.raises(ValueError, match="product"):
        derive_profile(describe(HIDDEN), measure(PROBES, HIDDEN), BASE, "mine")


def test_every_figure_of_the_document_has_a_source_and_the_document_is_a_profile() -> None:
    derived = derive_profile(describe(HIDDEN), measure([*KERNELS, *PROBES], HIDDEN), BASE, "mine")
    text = format_gpu_document(derived.hardware, source="as in the base", sources=derived.sources)
    assert parse_gpu(text) == derived.hardware
    assert "fitted to 33 measured steps" in derived.sources["efficiency"]


def test_ranks_of_a_cpu_get_measured_collectives() -> None:
    base = load_gpu("cpu")
    hidden = replace(base, attention_efficiency=0.5, launch_s=1e-4, intra_bandwidth_bytes_per_s=2e9)
    tasks = [*list_kernel_tasks(PROCESSOR, has_host_link=False), *list_collective_tasks(PROCESSOR, 4)]
    derived = derive_profile(describe(hidden, kind="cpu", ranks=4), measure(tasks, hidden, ranks=4), base, "cpu")
    tables = {(table.collective, table.ranks) for table in derived.hardware.collectives}
    assert tables == {(each, ranks) for each in Collective for ranks in (2, 4)}
    assert derived.hardware.intra_bandwidth_bytes_per_s == pytest.approx(2e9, rel=1e-3)
    assert derived.hardware.overlap_coefficient == pytest.approx(base.overlap_coefficient, rel=1e-3)
    assert derived.hardware.precision is Precision.FP32


def _validate(true: HardwareProfile, believed: HardwareProfile) -> list[str]:
    device = describe(true)
    tasks, _ = select_feasible(list_validation_tasks(ACCELERATOR, 1), believed, device)
    return [term.name for term in compare_steps(measure(tasks, true), believed, device).terms]


def test_validation_finds_no_error_where_there_is_none() -> None:
    device, hardware = describe(HIDDEN), replace(HIDDEN, reserve_bytes=CONTEXT_BYTES, reserve_ratio=0.1)
    tasks, infeasible = select_feasible(list_validation_tasks(ACCELERATOR, 1), hardware, device)
    result = compare_steps(measure(tasks, hardware), hardware, device)
    assert len(tasks) == len(list_validation_tasks(ACCELERATOR, 1))
    assert infeasible == 0
    assert result.time.worst < 1e-6
    assert result.memory.worst < 0.01
    assert max(abs(term.effect) for term in result.terms) < 0.02


def test_validation_names_the_term_that_is_off() -> None:
    assert _validate(HIDDEN, replace(HIDDEN, efficiency=0.4))[0] == "compute"
    assert _validate(HIDDEN, replace(HIDDEN, iteration_overhead_s=0.2))[0] == "overhead"


def test_terms_sum_to_the_predicted_step() -> None:
    device = describe(HIDDEN)
    tasks = list_validation_tasks(ACCELERATOR, 1)[:3]
    for step in compare_steps(measure(tasks, HIDDEN), HIDDEN, device).steps:
        terms = step.terms
        total_s = terms.compute_s + terms.tensor_s + terms.data_s + terms.optimizer_s + terms.bubble_s
        assert total_s + terms.overhead_s == pytest.approx(step.predicted_s)


def test_plans_that_do_not_fit_are_not_run() -> None:
    small = replace(HIDDEN, memory_bytes=30_000_000_000)
    tasks = list_validation_tasks(ACCELERATOR, 1)
    kept, infeasible = select_feasible(tasks, small, describe(small))
    assert 0 < len(kept) < len(tasks)
    assert len(kept) + infeasible == len(tasks)


def test_tasks_are_spread_over_the_list() -> None:
    tasks = list_validation_tasks(PROCESSOR, 4)
    kept = spread_out(tasks, 30)
    assert len(set(kept)) == 30
    assert {task.plan.pipeline_devices for task in kept} == {1, 2, 4}
    assert set(spread_out(tasks, 1000)) == set(tasks)


def test_all_plans_of_four_ranks_use_them() -> None:
    for task in (*list_validation_tasks(PROCESSOR, 4), *list_probe_tasks(PROCESSOR, 4)):
        assert isinstance(task, StepTask)
        assert task.plan.world_size == 4
    assert not any(isinstance(task, GemmTask) for task in list_collective_tasks(PROCESSOR, 4))
