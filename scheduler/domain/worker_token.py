"""Tokens of workers and agents: they let them speak for one job, and for nothing else.

A token is a keyed digest, so nothing has to be stored. A worker's is bound to job and generation and dies with its
generation: the API takes it only beside that job id and that generation. An agent's is bound to the job alone, because
an agent outlives generations; it is made with another key, so that neither can stand for the other.
"""

from __future__ import annotations

import base64
import hmac
from hashlib import sha256

WORKER_TOKEN_PREFIX = "ebt_"
AGENT_TOKEN_PREFIX = "eba_"
_AGENT_KEY = b"ebbtide agent tokens"


def issue_worker_token(secret: bytes, job_id: str, generation: int) -> str:
    """The token of one generation of a job's workers, safe in URLs and environment variables.

    Raises:
        ValueError: the secret is shorter than 16 bytes.
    """
    return WORKER_TOKEN_PREFIX + _digest(_require_secret_length(secret), f"{job_id}:{generation}")


def verify_worker_token(secret: bytes, token: str, job_id: str, generation: int) -> bool:
    """Whether `token` was issued for this job and generation; takes equally long for each wrong token."""
    return _tokens_equal(token, issue_worker_token(secret, job_id, generation))


def issue_agent_token(secret: bytes, job_id: str) -> str:
    """The token of a job's node agents.

    Raises:
        ValueError: the secret is shorter than 16 bytes.
    """
    key = hmac.new(_require_secret_length(secret), _AGENT_KEY, sha256).digest()
    return AGENT_TOKEN_PREFIX + _digest(key, job_id)


def verify_agent_token(secret: bytes, token: str, job_id: str) -> bool:
    """Whether `token` was issued for the agents of this job; takes equally long for each wrong token."""
    return _tokens_equal(token, issue_agent_token(secret, job_id))


def _require_secret_length(secret: bytes) -> bytes:
    if len(secret) < 16:
        raise ValueError(f"a token secret needs at least 16 bytes, got {len(secret)}")
    return secret


def _digest(key: bytes, text: str) -> str:
    digest = hmac.new(key, text.encode(), sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _tokens_equal(token: str, expected: str) -> bool:
    return hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())
