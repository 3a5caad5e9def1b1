"""Worker tokens."""

from __future__ import annotations

import pytest

from scheduler.domain.worker_token import check_token, issue_token

SECRET = b"a secret that only tests know...."


def test_a_token_is_good_for_its_job_and_generation_alone() -> None:
    token = issue_token(SECRET, "train-abc", 3)
    assert token.startswith("ebt_")
    assert check_token(SECRET, token, "train-abc", 3)
    assert not check_token(SECRET, token, "train-abc", 4)
    assert not check_token(SECRET, token, "train-abd", 3)
    assert not check_token(b"another secret of enough bytes!!", token, "train-abc", 3)
    assert not check_token(SECRET, "ebt_\ud800", "train-abc", 3)


def test_a_secret_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        issue_token(b"short", "train-abc", 3)
