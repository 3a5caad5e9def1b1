"""What `ebbtide explain` says reads as a sentence, whatever became of the job."""

from __future__ import annotations

from typing import Any

import pytest

from cli.commands.events import render_explanation


@pytest.mark.parametrize(
    ("state", "summary", "sentence"),
    [
        ("failed", "no plan fits, not even 1x4 cpu", "j has failed: no plan fits, not even 1x4 cpu."),
        ("succeeded", "succeeded", "j has succeeded."),
        ("cancelled", "cancelled by its owner", "j was cancelled: cancelled by its owner."),
        ("planning", "planning: no plan is solved yet", "j is planning: no plan is solved yet."),
    ],
)
def test_the_first_sentence_says_where_the_job_stands(state: str, summary: str, sentence: str) -> None:
    found = {"job_id": "j", "state": state, "summary": summary, "next": None}
    assert str(render_explanation(found)) == sentence


def test_of_many_holders_the_largest_are_named_and_the_rest_counted() -> None:
    reason = {"code": "InsufficientGpus", "detail": "", "numbers": {"needed_gpus": 4.0, "free_gpus": 0.0}}
    found: dict[str, Any] = {"job_id": "j", "state": "queued", "summary": "queued: so", "next": None, "reason": reason}
    found |= {"needed_gpus": 4, "held_gpus": 0, "free_gpus": 0, "holders": {f"h{at}": 8 for at in range(12)}}
    text = str(render_explanation({**found, "unblocks": "", "expected_start_s": None}))
    assert "It needs 4 GPUs to start and holds 0; 0 GPUs that training may use are free." in text
    assert "8 GPUs (h7) and 4 other jobs the rest." in text
