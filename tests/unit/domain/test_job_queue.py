"""Queue quotas: defaults and validation."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from scheduler.domain.job_queue import QUOTA_FIELDS, JobQueue, describe_quota


def test_default_queue_has_no_guarantee_no_limit_and_weight_1() -> None:
    assert JobQueue("default") == JobQueue("default", guaranteed_gpus=0, limit_gpus=None, weight=1.0)
    assert JobQueue("closed", limit_gpus=0).limit_gpus == 0


def test_every_field_but_the_name_is_a_declared_quota_field() -> None:
    assert ["name", *QUOTA_FIELDS] == [field.name for field in fields(JobQueue)]
    assert JobQueue("default").quota == {name: declared.default for name, declared in QUOTA_FIELDS.items()}


@pytest.mark.parametrize(
    ("field", "quota"),
    [
        ("guaranteed_gpus", {"guaranteed_gpus": -1}),
        ("guaranteed_gpus", {"guaranteed_gpus": None}),
        ("limit_gpus", {"guaranteed_gpus": 4, "limit_gpus": 3}),
        ("limit_gpus", {"limit_gpus": -1}),
        ("user_limit_gpus", {"user_limit_gpus": -1}),
        ("user_jobs_max", {"user_jobs_max": -1}),
        ("weight", {"weight": 0.0}),
        ("weight", {"weight": math.nan}),
        ("weight", {"weight": math.inf}),
    ],
)
def test_invalid_quota_is_rejected_with_field_and_value(field: str, quota: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be .*, got {quota[field]}"):
        JobQueue("q", **quota)  # type: ignore[arg-type]  # wrong on purpose


def test_quota_description_names_every_field_that_has_a_value() -> None:
    text = describe_quota(JobQueue("q", 8, 16).quota)
    described = {name for name, declared in QUOTA_FIELDS.items() if declared.label in text.replace("user limit", "")}
    assert described == {"guaranteed_gpus", "limit_gpus", "weight"}
