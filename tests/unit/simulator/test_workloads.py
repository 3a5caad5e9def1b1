"""From trace rows to submissions: ranges, lengths, and what is refused."""

from __future__ import annotations

import pytest

from scheduler.documents.throughput import StepByGpuCount
from scheduler.documents.trace_files import JobRow
from scheduler.domain.gpu_sets import GpuShape
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.workloads import Submission, WorkloadError, build_submissions
from tests.simulation.synthetic import small_cluster

CLUSTER = small_cluster(training=2, inference=1)


def submitted(row: JobRow, *, elastic: bool = True) -> Submission:
    (submission,) = build_submissions([row], CLUSTER, CurveCache(), elastic=elastic)
    return submission


@pytest.mark.parametrize(
    ("gpus", "low", "high"),
    [(1, 1, 1), (2, 1, 4), (3, 2, 6), (8, 4, 16), (16, 8, 24)],
)
def test_the_elastic_block_gives_jobs_a_range_capped_to_the_cluster(gpus: int, low: int, high: int) -> None:
    spec = submitted(JobRow(2, "a", 0.0, 10.0, gpus)).spec
    assert (spec.min_gpus, spec.max_gpus) == (low, high)


def test_the_rows_own_range_goes_before_the_elastic_block() -> None:
    spec = submitted(JobRow(2, "a", 0.0, 10.0, 4, min_gpus=3, max_gpus=500)).spec
    assert (spec.min_gpus, spec.max_gpus) == (3, 24)


def test_where_nothing_scales_a_job_keeps_to_the_trace_but_its_bound_stays() -> None:
    rigid = submitted(JobRow(2, "a", 0.0, 100.0, 4), elastic=False)
    assert (rigid.spec.min_gpus, rigid.spec.max_gpus) == (4, 4)
    assert rigid.run_time_s_min == 50.0


def test_a_job_without_a_model_has_a_step_for_every_gpu_second() -> None:
    submission = submitted(JobRow(2, "a", 5.0, 100.0, 4, deadline_s=300.0, priority=3, queue="research"))
    assert (submission.spec.steps, submission.at_s, submission.trace_gpus) == (400, 5.0, 4)
    assert submission.spec.deadline_s == 295.0, "a deadline counts from the submission"
    assert (submission.spec.priority, submission.spec.queue) == (3, "research")
    assert submission.spec.checkpoint.interval_s == CLUSTER.checkpoint_interval_s


def test_a_job_with_a_model_has_as_many_steps_as_its_plan_does_in_the_traces_time() -> None:
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
def test_a_job_that_does_not_fit_is_refused_with_its_line(row: JobRow, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        submitted(row)


NCF_S = {2: 4.0, 4: 2.5, 8: 2.0, 16: 3.0}
MEASURED = CurveCache([tuple(StepByGpuCount("a100-80g", "ncf", 64, gpus, time_s) for gpus, time_s in NCF_S.items())])


def measured(row: JobRow, *, elastic: bool = True) -> Submission:
    (submission,) = build_submissions([row], CLUSTER, MEASURED, elastic=elastic)
    return submission


def test_an_application_has_a_curve_only_where_it_was_measured() -> None:
    row = JobRow(2, "a", 0.0, 100.0, 4, global_batch=64, iterations=50, application="ncf")
    assert (submitted(row).spec.model, submitted(row).spec.steps) == ("", 400)
    assert (measured(row).spec.model, measured(row).spec.steps) == ("ncf", 50), "as many steps as iterations"
    unheard = JobRow(2, "a", 0.0, 100.0, 4, global_batch=32, application="ncf")
    assert measured(unheard).spec.model == "", "it was measured at another batch"


def test_a_measured_curve_narrows_the_range_to_counts_that_were_measured() -> None:
    row = JobRow(2, "a", 0.0, 100.0, 4, 1, 24, global_batch=64, iterations=50, application="ncf")
    assert (measured(row).spec.min_gpus, measured(row).spec.max_gpus) == (2, 16), "16 are slower than 8"
    assert measured(row).run_time_s_min == 50 * 2.0
    rigid = measured(row, elastic=False)
    assert (rigid.spec.min_gpus, rigid.spec.max_gpus, rigid.spec.duration_estimate_s) == (4, 4, 125.0)


def test_a_trace_without_run_times_needs_a_measured_curve() -> None:
    row = JobRow(9, "a", 0.0, 0.0, 4, global_batch=64, iterations=50, application="ncf", path="pollux.csv")
    assert measured(row).spec.duration_estimate_s == pytest.approx(50 * 4.0), "at the minimum, which is 2"
    with pytest.raises(WorkloadError, match=r"pollux\.csv line 9: application: got 'ncf'; .* gives no run times"):
        submitted(row)


def test_a_rigid_job_on_a_count_that_was_not_measured_is_refused() -> None:
    row = JobRow(9, "a", 0.0, 100.0, 3, 2, 8, global_batch=64, iterations=50, application="ncf")
    assert measured(row).spec.min_gpus == 2
    with pytest.raises(WorkloadError, match="line 9: gpus: got 3; allowed: a count that model ncf can run on"):
        measured(row, elastic=False)
