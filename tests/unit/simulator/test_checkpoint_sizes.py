"""Sizes of checkpoints of simulated jobs, and their cost in a simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import DemandRow, JobRow
from scheduler.simulator.checkpoint_sizes import CHECKPOINT_SHARE, compute_checkpoint_bytes
from scheduler.simulator.report import PolicyReport
from scheduler.simulator.simulate import simulate
from scheduler.simulator.workloads import Submission
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.model_profile import TrainingOptimizer
from tests.builders import GPU, a_spec

HARDWARE = {"nodes": 1, "gpus_per_node": 8, "gpu": GPU}
LENDING = {"headroom": 0.0, "return_deadline_s": 120, "cold_start_s": 200, "shortage_target": 0.1}


def cluster(**more: object) -> ClusterDocument:
    pools = [
        {"name": "training", "kind": "training", **HARDWARE},
        {"name": "inference", "kind": "inference", **HARDWARE, "lending": LENDING},
    ]
    return parse_document(ClusterDocument, {"pools": pools, "reconfiguration_s": 0, **more})


def test_model_has_its_weights_and_the_state_of_its_optimizer() -> None:
    model = load_model("llama-2-7b")
    submission = Submission(0.0, "a", a_spec(8, model="llama-2-7b", global_batch=8), 8, 1.0)
    assert compute_checkpoint_bytes([submission], GPU) == {"a": pytest.approx(12.0 * model.parameters)}
    assert replace(model, optimizer=TrainingOptimizer.PLAIN_SGD).checkpoint_bytes == 4.0 * model.parameters
    half = model.with_frozen_layers(model.layer_count // 2).checkpoint_bytes
    frozen = model.embedding.parameters + sum(run.layers * run.parameters for run in model.layers) // 2
    assert half == pytest.approx(12.0 * (model.parameters - frozen) + 2.0 * frozen)


def test_other_jobs_have_a_share_of_the_memory_of_their_gpus() -> None:
    submissions = [Submission(0.0, "a", a_spec(2, 8), 4, 1.0), Submission(0.0, "b", a_spec(2, gpu="t4"), 2, 1.0)]
    expected = {
        "a": CHECKPOINT_SHARE * 4 * load_gpu(GPU).memory_bytes,
        "b": CHECKPOINT_SHARE * 2 * load_gpu("t4").memory_bytes,
    }
    assert compute_checkpoint_bytes(submissions, GPU) == pytest.approx(expected)
    assert compute_checkpoint_bytes(submissions[:1], "abacus") == {"a": 0.0}


def simulate_preemption(storage_bytes_per_s: float | None) -> PolicyReport:
    """Let a short job preempt a long one, which has 41 GB to save and to load."""
    jobs = (JobRow(2, "long", 0.0, 1_000.0, 8), JobRow(3, "short", 100.0, 50.0, 8))
    demand = (DemandRow(2, 0.0, "inference", 8.0, is_load=False),)
    document = cluster(storage_bytes_per_s=storage_bytes_per_s, checkpoint_interval_s=30)
    return simulate(jobs, demand, document, "srtf", seed=0).policies[0]


def test_preemption_costs_a_save_and_a_load() -> None:
    memory_bytes = load_gpu(GPU).memory_bytes
    transfer_s = 20.0
    report = simulate_preemption(CHECKPOINT_SHARE * 8 * memory_bytes / transfer_s)
    free = simulate_preemption(None)
    assert (free.makespan_s, free.incomplete_saves) == (1_050.0, 0)
    assert report.makespan_s == pytest.approx(1_050.0 + 2 * transfer_s)
    assert (report.incomplete_saves, report.lost_gpu_hours) == (0, 0.0)


def test_save_longer_than_the_notice_loses_work_and_no_return_is_late() -> None:
    transfer_s = 70.0
    report = simulate_preemption(CHECKPOINT_SHARE * 8 * load_gpu(GPU).memory_bytes / transfer_s)
    assert report.incomplete_saves == 1
    assert report.lost_gpu_hours == pytest.approx(8 * 100.0 / 3600.0), "its first checkpoint was complete at 140 s"


@pytest.mark.parametrize("bad", [0, -1, "fast"])
def test_storage_bandwidth_must_be_positive(bad: object) -> None:
    with pytest.raises(InvalidDocumentError) as raised:
        cluster(storage_bytes_per_s=bad)
    assert raised.value.invalid_fields[0].field == "storage_bytes_per_s"
