"""Secrets of machines: join tokens, with which a machine joins, and credentials, with which its agent reports.

Both are random and stored as digests, as API tokens are (`api.identity.principals`).
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping

from api.identity.principals import token_digest
from scheduler.domain.machine import JOIN_TOKEN_PREFIX, MACHINE_CREDENTIAL_PREFIX, JoinToken, Machine
from scheduler.domain.worker_token import AGENT_TOKEN_PREFIX, verify_agent_token
from scheduler.store.api_protocol import MachineStore

CREDENTIAL_CACHE_S = 4.0
"""How long a revoked credential may still work in another process. The limit that the API states is 5 s."""
_SECRET_BYTES = 32
_JOB_PATH = re.compile(r"/v1/jobs/([^/]+)/")


def generate_join_token(
    pool: str, *, uses: int, created_by: str, now_s: float, expires_at_s: float
) -> tuple[JoinToken, str]:
    """Return a new token to store and its secret, which is stored nowhere."""
    secret = JOIN_TOKEN_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    token = JoinToken(f"join-{secrets.token_hex(6)}", token_digest(secret), pool, uses, now_s, created_by, expires_at_s)
    return token, secret


def generate_credential() -> tuple[str, str]:
    """Return the digest of a new credential, and the credential, which is stored nowhere."""
    secret = MACHINE_CREDENTIAL_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    return token_digest(secret), secret


class MachineCredentials:
    """Machines by their credential, read at most every CREDENTIAL_CACHE_S. Thread-safe.

    One read serves all agents of a process: two thousand agents that report every 2 s cost a read of the table every
    4 s instead of a thousand reads per second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._machines: Mapping[str, Machine] = {}
        self._read_at_s = float("-inf")

    def find(self, machines: MachineStore, secret: str, now_s: float) -> Machine | None:
        """Return the machine, possibly a revoked one, whose credential `secret` is. Raises UnavailableError."""
        digest = token_digest(secret)
        with self._lock:
            if not 0.0 <= now_s - self._read_at_s < CREDENTIAL_CACHE_S:
                self._machines = {machine.digest: machine for machine in machines.list_machines()}
                self._read_at_s = now_s
            found = self._machines.get(digest)
        return found or machines.find_machine(digest)  # it may have joined since

    def forget(self) -> None:
        """Read again at the next call. Call after a machine was revoked or has changed in this process."""
        with self._lock:
            self._read_at_s = float("-inf")


def is_genuine_token(machines: MachineStore, token_secret: bytes, token: str, path: str) -> bool:
    """Return whether the token is a live machine's credential, or that of agents of the job in the path.

    Raises:
        UnavailableError: the database cannot be read.
    """
    if token.startswith(MACHINE_CREDENTIAL_PREFIX):
        machine = machines.find_machine(token_digest(token))
        return machine is not None and machine.is_live
    job = _JOB_PATH.match(path)
    return job is not None and token.startswith(AGENT_TOKEN_PREFIX) and verify_agent_token(token_secret, token, job[1])
