"""Joining a pool: exchanging a join token for the credential of this machine."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.agent.agent_state import AgentIdentity
from scheduler.domain.codec import encode
from scheduler.domain.machine import MachineInventory

_TIMEOUT_S = 10.0


class JoinRefusedError(ValueError):
    """The control plane refused the machine. The message says why and what to do."""


def join(
    url: str,
    token_file: Path,
    *,
    name: str,
    gpu: str,
    address: str,
    version: str,
    containment: str,
    inventory: MachineInventory,
) -> AgentIdentity:
    """Join the pool of the token, and return the machine's identity with its credential.

    Args:
        gpu: name of the GPU profile; empty to derive it from the inventory.
        address: where ranks on other machines reach this one.

    Raises:
        JoinRefusedError: the token or the machine is not accepted, the token file cannot be read, or the control plane
            cannot be reached.
    """
    document = {
        "name": name,
        "gpu": gpu,
        "address": address,
        "version": version,
        "clock_s": time.time(),
        "containment": containment,
        "inventory": encode(inventory),
    }
    reply = _post(f"{url.rstrip('/')}/v1/machines:join", _read_token(token_file), document)
    return AgentIdentity(
        machine=reply["machine"]["name"],
        nodes=tuple(reply["machine"]["nodes"]),
        url=url.rstrip("/"),
        credential=reply["credential"],
    )


def _read_token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise JoinRefusedError(
            f"--token-file: {path} cannot be read: {error.strerror}. Write a token of `ebbtide machines token` to it."
        ) from None


def _post(url: str, token: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(url, json.dumps(document).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=ssl.create_default_context()) as reply:
            answer: Mapping[str, Any] = json.load(reply)
            return answer
    except urllib.error.HTTPError as error:
        raise JoinRefusedError(f"--join: {_describe_refusal(error)}") from None
    except (OSError, ValueError) as error:  # includes URLError, and an answer that is not JSON
        raise JoinRefusedError(
            f"--join: {url} cannot be reached: {error}. Check the URL, and that the service runs there."
        ) from None


def _describe_refusal(error: urllib.error.HTTPError) -> str:
    """Return the detail of a problem document, or the status if the reply is none."""
    try:
        problem = json.loads(error.read())
        return str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the control plane answered {error.code} {error.reason}"
