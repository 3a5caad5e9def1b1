"""What `ebbtide explain` says reads as a sentence, whatever became of the job."""

from __future__ import annotations

import pytest

from scheduler.cli.record import explanation_view


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
    assert str(explanation_view(found)) == sentence
