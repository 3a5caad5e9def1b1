"""Tokens of workers and node agents."""

from __future__ import annotations

import pytest

from scheduler.domain.worker_token import issue_agent_token, issue_worker_token, verify_agent_token, verify_worker_token

SECRET = b"a secret that only tests know...."


def test_worker_token_is_valid_for_its_job_and_generation_only() -> None:
    token = issue_worker_token(SECRET, "train-abc", 3)
    assert token.startswith("ebt_")
    assert verify_worker_token(SECRET, token, "train-abc", 3)
    assert not verify_worker_token(SECRET, token, "train-abc", 4)
    assert not verify_worker_token(SECRET, token, "train-abd", 3)
    assert not verify_worker_token(b"another secret of enough bytes!!", token, "train-abc", 3)
    assert not verify_worker_token(SECRET, "ebt_\ud800", "train-abc", 3)


def test_short_secret_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        issue_worker_token(b"short", "train-abc", 3)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        issue_agent_token(b"short", "train-abc")


def test_agent_token_is_valid_for_its_job_only() -> None:
    token = issue_agent_token(SECRET, "train-abc")
    assert token.startswith("eba_")
    assert verify_agent_token(SECRET, token, "train-abc")
    assert not verify_agent_token(SECRET, token, "train-abd")
    assert not verify_agent_token(b"another secret of enough bytes!!", token, "train-abc")


@pytest.mark.parametrize("job_id", ["train-abc", "train-abc:3", "", ":0"])
def test_neither_kind_of_token_is_valid_as_the_other(job_id: str) -> None:
    agent_token, worker_token = issue_agent_token(SECRET, job_id), issue_worker_token(SECRET, "train-abc", 3)
    assert not verify_worker_token(SECRET, agent_token, job_id, 3)
    assert not verify_worker_token(SECRET, agent_token.replace("eba_", "ebt_"), "train-abc", 3)
    assert not verify_agent_token(SECRET, worker_token, job_id)
    assert not verify_agent_token(SECRET, worker_token.replace("ebt_", "eba_"), job_id)
