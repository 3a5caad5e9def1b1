"""Joining a pool: exchanging a join token for a credential, and stating the facts of the machine at each start."""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.progress import TOO_MANY_REQUESTS
from scheduler.agent.agent_state import AgentIdentity
from scheduler.domain.codec import encode
from scheduler.domain.machine import MachineInventory

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0
_FIRST_SERVER_ERROR = 500


class JoinRefusedError(ValueError):
    """The control plane refused the machine. The message says why and what to do."""


class UnreachableError(Exception):
    """The control plane cannot be reached, or cannot answer now."""


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What an agent states of its machine.

    Args:
        gpu: name of the GPU profile; empty to derive it from the inventory.
        address: where ranks on other machines reach this one; empty for the address that reaches the control plane.
    """

    gpu: str
    address: str
    version: str
    containment: str
    inventory: MachineInventory

    def to_document(self, url: str) -> dict[str, Any]:
        """Return the document for the control plane at `url`. Raises OSError if no address reaches it."""
        return {
            "gpu": self.gpu,
            "address": self.address or find_address(url),
            "version": self.version,
            "clock_s": time.time(),
            "containment": self.containment,
            "inventory": encode(self.inventory),
        }


def join(url: str, token_file: Path, *, name: str, facts: AgentFacts, is_temporary: bool = False) -> AgentIdentity:
    """Join the pool of the token, and return the machine's identity with its credential.

    Args:
        is_temporary: whether the service removes the machine once it has left or was silent for long.

    Raises:
        JoinRefusedError: the URL, the token or the machine is not accepted, the token file cannot be read, or the
            control plane cannot be reached.
    """
    _check_url(url)
    token = _read_token(token_file)
    target = f"{url.rstrip('/')}/v1/machines:join"
    try:
        temporary = {"temporary": True} if is_temporary else {}
        reply = _send("POST", target, token, lambda: {**facts.to_document(url), "name": name, **temporary})
    except UnreachableError as error:
        raise JoinRefusedError(
            f"--join: {target} cannot be reached: {error}. Check the URL, and that the service runs there."
        ) from None
    except JoinRefusedError as error:
        raise JoinRefusedError(f"--join: {error}") from None
    return AgentIdentity(
        machine=reply["machine"]["name"],
        nodes=tuple(reply["machine"]["nodes"]),
        url=url.rstrip("/"),
        credential=reply["credential"],
    )


def send_facts(identity: AgentIdentity, facts: AgentFacts) -> str:
    """State the facts of a machine that has joined, and return its problem, empty without one.

    Waits while the control plane cannot be reached, because an agent has nothing to do without it.

    Raises:
        JoinRefusedError: the agent's version, its clock or its hardware is not accepted, or the machine was removed.
    """
    target = f"{identity.url}/v1/machines/{urllib.parse.quote(identity.machine, safe='')}/facts"
    backoff_s = _MIN_BACKOFF_S
    while True:
        try:
            reply = _send("PUT", target, identity.credential, lambda: facts.to_document(identity.url))
            return str(reply["problem"])
        except UnreachableError as error:
            if backoff_s == _MIN_BACKOFF_S:
                logger.warning("cannot reach the control plane at %s; ranks continue: %s", identity.url, error)
            time.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(_MAX_BACKOFF_S, 2.0 * backoff_s)


def leave(identity: AgentIdentity) -> str:
    """Give up the credential of a temporary machine. Return why that failed, empty if it did not."""
    target = f"{identity.url}/v1/machines/{urllib.parse.quote(identity.machine, safe='')}/leave"
    try:
        _send("POST", target, identity.credential, dict)
    except (UnreachableError, JoinRefusedError) as error:
        return str(error)
    return ""


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for example, the port is no number
        is_valid = False
    if not is_valid:
        raise JoinRefusedError(f"--join: {url!r} is not the URL of a service. Use one such as https://ebbtide.example.")


def _read_token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise JoinRefusedError(
            f"--token-file: {path} cannot be read: {error.strerror}. Write a token of `ebbtide machines token` to it."
        ) from None


def _send(method: str, url: str, token: str, build: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Build a document, send it and return the answer.

    Raises:
        JoinRefusedError: the control plane refused it.
        UnreachableError: it cannot be reached, is overloaded, or its answer is not JSON.
    """
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(url, json.dumps(build()).encode(), headers, method=method)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=ssl.create_default_context()) as reply:
            answer: Mapping[str, Any] = json.load(reply)
            return answer
    except urllib.error.HTTPError as error:
        detail = _describe_refusal(error)
        if error.code >= _FIRST_SERVER_ERROR or error.code == TOO_MANY_REQUESTS:
            raise UnreachableError(detail) from None
        raise JoinRefusedError(detail) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # includes URLError
        raise UnreachableError(str(error)) from None


def _describe_refusal(error: urllib.error.HTTPError) -> str:
    """Return the detail of a problem document, or the status if the reply is none."""
    try:
        problem = json.loads(error.read())
        return str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the control plane answered {error.code} {error.reason}"


def find_address(url: str) -> str:
    """Return the address of this machine on the route to the control plane."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "", parts.port or 80))
        address: str = probe.getsockname()[0]
    return address
