"""Durations of starts and restarts by model, for the executor and the policies."""

from __future__ import annotations

import pytest

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.throughput import StepByGpuCount
from scheduler.documents.trace_files import JobRow
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.simulator.simulate import SimulationOptions, build_scenario, resolve_policy_sets, simulate
from scheduler.simulator.throughput_curves import CurveCache
from tests.builders import a_job

POOL = {"name": "training", "kind": "training", "nodes": 1, "gpus_per_node": 8, "gpu": "t4"}
TABLE = {"default": 30, "bert": "2m"}
PROFILE = (StepByGpuCount("t4", "bert", 64, 4, 2.0), StepByGpuCount("t4", "bert", 64, 8, 1.0))
ROW = JobRow(2, "a", 0.0, 100.0, 4, global_batch=64, iterations=50, application="bert")


def cluster(**more: object) -> ClusterDocument:
    return parse_document(ClusterDocument, {"pools": [POOL], "reconfiguration_s": TABLE, **more})


def test_executor_and_policies_use_the_same_reconfiguration_times() -> None:
    (policies,) = resolve_policy_sets("sjf", cluster())
    bert, other = a_job("a", model="bert", global_batch=64), a_job("b")
    assert (policies.settings.reconfiguration_s_for(bert), policies.settings.reconfiguration_s_for(other)) == (
        120.0,
        30.0,
    )
    delays = build_scenario([ROW], (), cluster(), policies, seed=0, curves=CurveCache([PROFILE])).delays
    for model, cost_s in (("bert", 120.0), ("", 30.0), ("gpt2", 30.0)):
        job = a_job("b", model=model, global_batch=64 if model else 0)
        total_s = delays.compute_save_s(job, nodes=1) + delays.compute_restart_s(job, nodes=1)
        assert total_s == pytest.approx(cost_s)


def test_default_reconfiguration_time_applies_to_all_models() -> None:
    settings = PolicySettings(reconfiguration_s=45.0)
    assert settings.reconfiguration_s_for(a_job("a", model="bert", global_batch=64)) == 45.0


@pytest.mark.parametrize(("start_s", "jct_s"), [(0, 100.0), (260, 360.0)])
def test_first_start_takes_the_time_of_the_cluster_document(start_s: int, jct_s: float) -> None:
    options = SimulationOptions(profiles=(PROFILE,))
    (report,) = simulate([ROW], (), cluster(start_s=start_s), "sjf", seed=0, options=options).policies
    assert report.jct_s.mean == jct_s


def test_gpu_with_measurements_needs_no_solver_profile() -> None:
    unheard = parse_document(ClusterDocument, {"pools": [{**POOL, "gpu": "abacus"}]})
    options = SimulationOptions(profiles=((StepByGpuCount("abacus", "bert", 64, 4, 2.0),),))
    (report,) = simulate([ROW], (), unheard, "sjf", seed=0, options=options).policies
    assert (report.completed, report.jct_s.mean) == (1, 100.0)
    with pytest.raises(ValueError, match="'abacus'"):
        simulate([ROW], (), unheard, "sjf", seed=0)
