"""Submissions from trace rows: ranges, lengths and errors."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.throughput import StepByGpuCount
from scheduler.documents.trace_files import JobRow
from scheduler.domain.gpu_sets import GpuShape
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.workloads import Submission, WorkloadError, build_submissions
from scheduler.solver.profiles.gpu_throughput import list_throughputs
from tests.simulation.synthetic import small_cluster

CLUSTER = small_cluster(training=2, inference=1)


def build_submission(row: JobRow, *, elastic: bool = True) -> Submission:
    (submission,) = build_submissions([row], CLUSTER, CurveCache(), elastic=elastic)
    return submission


@pytest.mark.parametrize(
    ("gpus", "low", "high"),
    [(1, 1, 1), (2, 1, 4), (3, 2, 6), (8, 4, 16), (16, 8, 24)],
)
def test_elastic_block_defines_ranges_within_the_cluster(gpus: int, low: int, high: int) -> None:
    spec = build_submission(JobRow(2, "a", 0.0, 10.0, gpus)).spec
    assert (spec.min_gpus, spec.max_gpus) == (low, high)


def test_range_of_the_row_takes_precedence_over_the_elastic_block() -> None:
    spec = build_submission(JobRow(2, "a", 0.0, 10.0, 4, min_gpus=3, max_gpus=500)).spec
    assert (spec.min_gpus, spec.max_gpus) == (3, 24)


def test_inelastic_job_keeps_the_trace_gpus_and_its_bound() -> None:
    rigid = build_submission(JobRow(2, "a", 0.0, 100.0, 4), elastic=False)
    assert (rigid.spec.min_gpus, rigid.spec.max_gpus) == (4, 4)
    assert rigid.run_time_s_min == 50.0


def test_job_without_a_model_has_one_step_per_gpu_second() -> None:
    submission = build_submission(JobRow(2, "a", 5.0, 100.0, 4, deadline_s=300.0, priority=3, queue="research"))
    assert (submission.spec.steps, submission.at_s, submission.trace_gpus) == (400, 5.0, 4)
    assert submission.spec.deadline_s == 295.0, "a deadline counts from the submission"
    assert (submission.spec.priority, submission.spec.queue) == (3, "research")
    assert submission.spec.checkpoint.interval_s == CLUSTER.checkpoint_interval_s


def test_job_with_a_model_has_the_steps_of_its_plan() -> None:
    curves = CurveCache()
    row = JobRow(2, "a", 0.0, 3600.0, 2, model="gpt2", global_batch=64)
    (submission,) = build_submissions([row], CLUSTER, curves, elastic=True)
    plan = curves.get_job_point(submission.spec, GpuShape.packed("a100-80g", 2, 8)).plan
    assert plan is not None
    assert submission.spec.steps == round(3600.0 / plan.iteration_time_s)
    assert 1800.0 < submission.run_time_s_min < 3600.0, "twice the GPUs help, by less than twice"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (JobRow(7, "a", 0.0, 1.0, 40), "line 7: gpus: got 20; allowed: at most 16, the training pools' GPUs"),
        (JobRow(7, "a", 0.0, 1.0, 4, min_gpus=17, max_gpus=20), "line 7: min_gpus: got 17; allowed: at most 16"),
        (JobRow(7, "a", 0.0, 1.0, 4, gpu="t4"), "line 7: gpu: got 't4'; allowed: .*a100-80g"),
        (JobRow(7, "a", 0.0, 1.0, 4, model="gpt9", global_batch=8), "line 7: model: got 'gpt9'; allowed: .*gpt2"),
        (JobRow(7, "a", 0.0, 1.0, 1, model="llama-2-70b", global_batch=8), "line 7: gpus: got 1; allowed: a count"),
    ],
)
def test_error_names_the_line_of_a_job_that_does_not_fit(row: JobRow, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        build_submission(row)


NCF_S = {2: 4.0, 4: 2.5, 8: 2.0, 16: 3.0}
MEASURED = CurveCache([tuple(StepByGpuCount("a100-80g", "ncf", 64, gpus, time_s) for gpus, time_s in NCF_S.items())])


def build_measured_submission(row: JobRow, *, elastic: bool = True) -> Submission:
    (submission,) = build_submissions([row], CLUSTER, MEASURED, elastic=elastic)
    return submission


def test_only_measured_applications_have_a_curve() -> None:
    row = JobRow(2, "a", 0.0, 100.0, 4, global_batch=64, iterations=50, application="ncf")
    assert (build_submission(row).spec.model, build_submission(row).spec.steps) == ("", 400)
    assert (build_measured_submission(row).spec.model, build_measured_submission(row).spec.steps) == ("ncf", 50), (
        "as many steps as iterations"
    )
    unheard = JobRow(2, "a", 0.0, 100.0, 4, global_batch=32, application="ncf")
    assert build_measured_submission(unheard).spec.model == "", "it was measured at another batch"


def test_measured_curve_limits_the_range_to_measured_counts() -> None:
    row = JobRow(2, "a", 0.0, 100.0, 4, 1, 24, global_batch=64, iterations=50, application="ncf")
    assert (build_measured_submission(row).spec.min_gpus, build_measured_submission(row).spec.max_gpus) == (2, 16), (
        "16 are slower than 8"
    )
    assert build_measured_submission(row).run_time_s_min == 50 * 2.0
    rigid = build_measured_submission(row, elastic=False)
    assert (rigid.spec.min_gpus, rigid.spec.max_gpus, rigid.spec.duration_estimate_s) == (4, 4, 125.0)


def test_trace_without_run_times_needs_a_measured_curve() -> None:
    row = JobRow(9, "a", 0.0, 0.0, 4, global_batch=64, iterations=50, application="ncf", path="pollux.csv")
    assert build_measured_submission(row).spec.duration_estimate_s == pytest.approx(50 * 4.0), (
        "at the minimum, which is 2"
    )
    with pytest.raises(WorkloadError, match=r"pollux\.csv line 9: application: got 'ncf'"):
        build_submission(row)


def test_inelastic_job_on_an_unmeasured_count_is_refused() -> None:
    row = JobRow(9, "a", 0.0, 100.0, 3, 2, 8, global_batch=64, iterations=50, application="ncf")
    assert build_measured_submission(row).spec.min_gpus == 2
    with pytest.raises(WorkloadError, match="line 9: gpus: got 3"):
        build_measured_submission(row, elastic=False)


def build_on(ran_on: str, **more: Any) -> Submission:
    return build_submission(JobRow(2, "a", 0.0, 1000.0, 4, ran_on=ran_on, **more))


def test_trace_on_another_model_counts_by_its_relative_speed() -> None:
    throughputs = list_throughputs()
    ratio = throughputs["v100-32g"] / throughputs["a100-80g"]
    slow, own = build_on("v100-32g"), build_on("a100-80g")
    assert own == build_on("")
    assert slow.spec.steps == round(4000 * ratio)
    assert slow.spec.duration_estimate_s == pytest.approx(2000.0 * ratio)
    assert slow.run_time_s_min == pytest.approx(500.0 * ratio)


def test_trace_of_a_model_on_another_gpu_has_the_steps_of_its_plan_there() -> None:
    more = {"model": "gpt2", "global_batch": 64}
    own, slow = build_on("a100-80g", **more), build_on("v100-32g", **more)
    assert own == build_on("", **more)
    assert slow.spec.steps < own.spec.steps / 1.5


@pytest.mark.parametrize("more", [{}, {"model": "gpt2", "global_batch": 64}])
def test_unknown_model_of_a_trace_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=r"line 2: ran_on: got 'tpu'; allowed: a100-40g, a100-40g-pcie, a100-80g"):
        build_on("tpu", **more)


def test_bound_counts_the_fastest_model_of_the_cluster() -> None:
    row = JobRow(2, "a", 0.0, 1000.0, 4, min_gpus=4, max_gpus=4)
    pools = [
        {"name": name, "kind": kind, "nodes": 1, "gpus_per_node": 8, "gpu": gpu}
        for name, kind, gpu in (("own", "training", "v100-32g"), ("served", "inference", "h100-80g"))
    ]
    (submission,) = build_submissions(
        [row], parse_document(ClusterDocument, {"pools": pools}), CurveCache(), elastic=True
    )
    throughputs = list_throughputs()
    assert submission.run_time_s_min == pytest.approx(1000.0 * throughputs["v100-32g"] / throughputs["h100-80g"])
