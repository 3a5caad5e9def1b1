"""Tokens of workers and node agents. A token is valid for one job.

A token is an HMAC, so none are stored. A worker token is bound to a job and a generation. An agent token is
bound to the job only, because an agent outlives generations. Agent tokens use a derived key, so that neither kind is
valid as the other.
"""

from __future__ import annotations

import base64
import hmac
from hashlib import sha256

WORKER_TOKEN_PREFIX = "ebt_"
AGENT_TOKEN_PREFIX = "eba_"
_AGENT_KEY = b"ebbtide agent tokens"


def issue_worker_token(secret: bytes, job_id: str, generation: int) -> str:
    """Return the token for one generation of a job's workers, safe in URLs and environment variables.

    Raises:
        ValueError: the secret is shorter than 16 bytes.
    """
    return WORKER_TOKEN_PREFIX + _digest(_require_secret_length(secret), f"{job_id}:{generation}")


def verify_worker_token(secret: bytes, token: str, job_id: str, generation: int) -> bool:
    """Return whether `token` belongs to this job and generation. Takes constant time for wrong tokens."""
    return _tokens_equal(token, issue_worker_token(secret, job_id, generation))


def issue_agent_token(secret: bytes, job_id: str) -> str:
    """Return the token for a job's node agents.

    Raises:
        ValueError: the secret is shorter than 16 bytes.
    """
    key = hmac.new(_require_secret_length(secret), _AGENT_KEY, sha256).digest()
    return AGENT_TOKEN_PREFIX + _digest(key, job_id)


def verify_agent_token(secret: bytes, token: str, job_id: str) -> bool:
    """Return whether `token` belongs to the agents of this job. Takes constant time for wrong tokens."""
    return _tokens_equal(token, issue_agent_token(secret, job_id))


def _require_secret_length(secret: bytes) -> bytes:
    if len(secret) < 16:
        raise ValueError(f"the token secret has {len(secret)} bytes; it must have at least 16 bytes")
    return secret


def _digest(key: bytes, text: str) -> str:
    digest = hmac.new(key, text.encode(), sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _tokens_equal(token: str, expected: str) -> bool:
    return hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())
