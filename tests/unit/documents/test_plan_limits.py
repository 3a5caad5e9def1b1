"""The limits of plans in job documents and plan requests."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, to_job_document
from scheduler.domain.plan_limits import NO_LIMITS, PlanDimension, PlanLimits

JOB = {"name": "a", "gpus": {"min": 1, "max": 8}, "model": "gpt2", "globalBatch": 8}
PLAN: dict[str, Any] = {
    "without": ["pp", "zero"],
    "max": {"tp": 4},
    "exclusive": [["fsdp", "offload"]],
    "microBatchesMin": 2,
    "microBatchesMax": 8,
    "replicaSamplesMax": 4,
    "fullPipeline": True,
    "wholeRounds": True,
    "uniform": True,
    "equalStages": True,
    "simplicity": 0.02,
}


def test_plan_of_a_job_becomes_limits_and_comes_back() -> None:
    spec = parse_job({**JOB, "plan": PLAN})
    assert spec.plan_limits == PlanLimits(
        excluded=(PlanDimension.PIPELINE, PlanDimension.ZERO1, PlanDimension.ZERO2),
        exclusive=((PlanDimension.FSDP, PlanDimension.OFFLOAD),),
        degrees_max=((PlanDimension.TENSOR, 4),),
        micro_batches_min=2,
        micro_batches_max=8,
        replica_samples_max=4,
        fills_pipeline=True,
        has_whole_rounds=True,
        is_uniform=True,
        has_equal_stages=True,
    )
    assert spec.plan_simplicity == 0.02
    assert parse_job(to_job_document(spec)) == spec


def test_only_excludes_all_other_dimensions() -> None:
    spec = parse_job({**JOB, "plan": {"only": ["fsdp", "recompute"], "without": ["recompute"]}})
    allowed = {dimension for dimension in PlanDimension if spec.plan_limits.allows(dimension)}
    assert allowed == {PlanDimension.FSDP, PlanDimension.DATA, PlanDimension.ONE_F_ONE_B}
    assert parse_job(to_job_document(spec)) == spec


def test_jobs_with_different_limits_have_different_curves() -> None:
    plans: list[dict[str, Any]] = [{}, {"without": ["tp"]}, {"uniform": True}, {"simplicity": 0.02}]
    specs = [parse_job({**JOB, "plan": plan}) for plan in plans]
    assert specs[0].plan_limits == NO_LIMITS
    assert specs[0].curve_key == parse_job(JOB).curve_key
    assert len({spec.curve_key for spec in specs}) == len(plans)
    for spec in specs:
        assert spec.curve_request is not None
        assert spec.curve_request.key == spec.curve_key


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        ({"without": ["tensr"]}, "plan.without.0"),
        ({"only": []}, "plan.only"),
        ({"max": {"offload": 2}}, "plan.max"),
        ({"max": {"zero": 2}}, "plan.max"),
        ({"max": {"tp": 0}}, "plan.max"),
        ({"exclusive": [["tp"]]}, "plan.exclusive.0"),
        ({"microBatchesMin": 4, "microBatchesMax": 2}, "plan.microBatchesMax"),
        ({"simplicity": 2}, "plan.simplicity"),
        ({"widths": 1}, "plan.widths"),
    ],
)
def test_invalid_limits_are_rejected_by_field(plan: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job({**JOB, "plan": plan})
    assert refused.value.invalid_fields[0].field.startswith(field)


@pytest.mark.parametrize("change", [{"model": ""}, {"lengths": {"512": 1}}])
def test_limits_need_a_model_and_samples_of_equal_length(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job({**JOB, **change, "plan": {"uniform": True}})
    assert refused.value.invalid_fields[0].field == "plan"
