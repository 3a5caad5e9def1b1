"""What the agent of a pod is told through environment variables, checked once at the door."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """`pod` tells this agent from others on its node. `grace_s`: between SIGTERM and SIGKILL. `token_file` is read
    anew for each connection, so that a token may change. `checkpoint_dir` is where a volume is mounted."""

    job_id: str
    node: str
    url: str
    token: str
    token_file: Path | None
    run_root: Path
    checkpoint_dir: str
    pod: str
    grace_s: float

    def read_token(self) -> str:
        """Raises OSError where the file cannot be read."""
        return self.token if self.token_file is None else self.token_file.read_text(encoding="utf-8").strip()


def pod_environment(variables: Mapping[str, str]) -> PodEnvironment:
    """Reads EBBTIDE_JOB_ID, EBBTIDE_NODE, EBBTIDE_URL, EBBTIDE_RUN_ROOT, EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE;
    EBBTIDE_CHECKPOINT_DIR, EBBTIDE_POD (default: drawn) and EBBTIDE_GRACE_S (30) may be left out.

    Raises:
        ValueError: a variable is missing or holds something else than it may; the message names it.
    """
    url = _needed(variables, "EBBTIDE_URL")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"EBBTIDE_URL is {url!r}, it must start with http:// or https://")
    token_file = variables.get("EBBTIDE_TOKEN_FILE", "")
    return PodEnvironment(
        job_id=_needed(variables, "EBBTIDE_JOB_ID"),
        node=_needed(variables, "EBBTIDE_NODE"),
        url=url.rstrip("/"),
        token="" if token_file else _needed(variables, "EBBTIDE_TOKEN", "or EBBTIDE_TOKEN_FILE"),
        token_file=Path(token_file) if token_file else None,
        run_root=Path(_needed(variables, "EBBTIDE_RUN_ROOT")),
        checkpoint_dir=variables.get("EBBTIDE_CHECKPOINT_DIR", ""),
        pod=variables.get("EBBTIDE_POD", "") or secrets.token_hex(8),
        grace_s=_seconds(variables, "EBBTIDE_GRACE_S", default=30.0),
    )


def _needed(variables: Mapping[str, str], name: str, other: str = "") -> str:
    text = variables.get(name, "")
    if not text:
        raise ValueError(f"{name} is missing" + (f", {other}" if other else ""))
    return text


def _seconds(variables: Mapping[str, str], name: str, *, default: float) -> float:
    text = variables.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {text!r}, it must be a number of seconds of at least 0")
    return seconds
