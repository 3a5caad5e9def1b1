"""The field `framework` of a job document."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, to_job_document
from scheduler.domain.codec import decode, encode
from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.plan_limits import PlanDimension

JOB: dict[str, Any] = {
    "name": "a",
    "gpus": {"min": 1, "max": 8},
    "model": "gpt2",
    "globalBatch": 8,
    "framework": "megatron-lm",
    "command": ["python", "pretrain_gpt.py", "{plan.args}"],
}


def test_the_document_and_the_specification_convert_into_each_other() -> None:
    spec = parse_job(JOB)
    assert spec.framework == to_job_document(spec)["framework"] == "megatron-lm"
    assert parse_job(to_job_document(spec)) == decode(JobSpec, encode(spec)) == spec


def test_curves_are_solved_under_the_limits_of_framework_and_owner() -> None:
    plain = parse_job({**JOB, "framework": "", "command": ["python"]})
    spec = parse_job({**JOB, "plan": {"without": ["tensor"]}})
    assert plain.search_limits == plain.plan_limits
    assert spec.search_limits == FRAMEWORK_LIMITS["megatron-lm"].combine(spec.plan_limits)
    assert not spec.search_limits.allows(PlanDimension.TENSOR)
    assert len({each.curve_key for each in (plain, spec, parse_job(JOB))}) == 3
    assert spec.curve_request is not None
    assert spec.curve_request.key == spec.curve_key
    assert not spec.may_mix_gpu_models


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"framework": "megatron"}, "framework"),
        ({"model": "", "globalBatch": None}, "framework"),
        ({"lengths": {"512": 90, "1024": 10}}, "framework"),
        ({"command": ["python", "pretrain_gpt.py"]}, "command"),
        ({"command": ["python", "{plan.args}", "{plan.nope}"]}, "command"),
        ({"command": ["python", "{plan.file}"]}, "command"),
        ({"framework": ""}, "command"),
    ],
)
def test_bad_input_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job({**JOB, **changes})
    assert [each.field for each in refused.value.invalid_fields] == [field]
