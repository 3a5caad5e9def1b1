"""Worker tokens: they let the workers of one generation of one job speak for it, and for nothing else.

A token is a keyed digest of `job_id:generation`, so nothing has to be stored, and it dies with its generation:
the API takes it only beside that job id and that generation.
"""

from __future__ import annotations

import base64
import hmac
from hashlib import sha256

PREFIX = "ebt_"


def issue_token(secret: bytes, job_id: str, generation: int) -> str:
    """The token of one generation of a job's workers, safe in URLs and environment variables.

    Raises:
        ValueError: the secret is shorter than 16 bytes.
    """
    if len(secret) < 16:
        raise ValueError(f"a token secret needs at least 16 bytes, got {len(secret)}")
    digest = hmac.new(secret, f"{job_id}:{generation}".encode(), sha256).digest()
    return PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def check_token(secret: bytes, token: str, job_id: str, generation: int) -> bool:
    """Whether `token` was issued for this job and generation; takes equally long for each wrong token."""
    expected = issue_token(secret, job_id, generation)
    return hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())
