"""Sentences of `ebbtide explain` for jobs in every state."""

from __future__ import annotations

from typing import Any

import pytest

from cli.commands.events import render_explanation


@pytest.mark.parametrize(
    ("state", "summary", "sentence"),
    [
        ("failed", "no plan fits, not even 1x4 cpu", "j has failed: no plan fits, not even 1x4 cpu."),
        ("failed", "cannot open '..", "j has failed: cannot open '."),
        ("succeeded", "succeeded", "j has succeeded."),
        ("cancelled", "cancelled by its owner", "j was cancelled: cancelled by its owner."),
        ("planning", "planning: no plan is solved yet", "j is planning: no plan is solved yet."),
    ],
)
def test_first_sentence_describes_the_state(state: str, summary: str, sentence: str) -> None:
    explanation = {"job_id": "j", "state": state, "summary": summary, "failure": None, "next": None}
    assert str(render_explanation(explanation)) == sentence


def test_many_holders_are_shortened_to_the_largest_and_a_count() -> None:
    reason = {"code": "InsufficientGpus", "detail": "", "numbers": {"needed_gpus": 4.0, "free_gpus": 0.0}}
    explanation: dict[str, Any] = {
        "job_id": "j",
        "state": "queued",
        "summary": "queued: so",
        "failure": None,
        "next": None,
        "reason": reason,
    }
    explanation |= {"needed_gpus": 4, "held_gpus": 0, "free_gpus": 0, "holders": {f"h{at}": 8 for at in range(12)}}
    text = str(render_explanation({**explanation, "unblocks": "", "expected_start_s": None}))
    assert "It needs 4 GPUs to start and holds 0; 0 GPUs" in text
    assert "8 GPUs (h7) and 4 more jobs" in text


def test_last_failure_of_a_job_that_is_retried_is_shown() -> None:
    explanation = {
        "job_id": "j",
        "summary": "x",
        "failure": {"reason": "rank 0 exited with code 1: boom"},
        "next": None,
    }
    assert "rank 0 exited with code 1: boom" in str(render_explanation({**explanation, "state": "cancelled"}))
    assert "boom" not in str(render_explanation({**explanation, "state": "failed"})), "its summary has the reason"
