"""`checkpoint.path` and `checkpoint.signal` of a job document."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, to_job_document
from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.job_account import OnResize

JOB: dict[str, Any] = {"name": "a", "gpus": {"min": 1, "max": 4}, "command": ["python", "train.py"]}


@pytest.mark.parametrize("path", ["ckpt.pt", "out/checkpoint-*", "a b/?.pt"])
@pytest.mark.parametrize("signal", ["SIGUSR1", ""])
def test_checkpoints_of_a_script_are_kept_in_a_round_trip(path: str, signal: str) -> None:
    given = {"path": path, **({"signal": signal} if signal else {})}
    spec = parse_job({**JOB, "checkpoint": given})
    assert spec.checkpoint == CheckpointSpec(path=path, signal=signal)
    assert spec.on_resize is OnResize.CHECKPOINT
    assert parse_job(to_job_document(spec)) == spec


@pytest.mark.parametrize(
    ("checkpoint", "field"),
    [
        ({"path": "/abs/ckpt.pt"}, "checkpoint.path"),
        ({"path": "../ckpt.pt"}, "checkpoint.path"),
        ({"path": "**/ckpt.pt"}, "checkpoint.path"),
        ({"path": ""}, "checkpoint.path"),
        ({"path": "ckpt.pt", "dir": "s3://bucket/run"}, "checkpoint.path"),
        ({"path": "ckpt.pt", "signal": "SIGKILL"}, "checkpoint.signal"),
        ({"signal": "SIGTERM"}, "checkpoint.signal"),
    ],
)
def test_unusable_checkpoint_field_is_named(checkpoint: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidDocumentError, match=field):
        parse_job({**JOB, "checkpoint": checkpoint})
