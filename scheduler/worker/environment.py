"""Environment variables of pod agents, validated once at startup."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbtide.environment import parse_url


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """Settings of a pod agent, read from its environment.

    Attributes:
        token_file: read again for each connection, so that the token can be rotated. Takes precedence over `token`.
        checkpoint_dir: mount path of the checkpoint volume, empty without one.
        pod: identifies this agent among others on its node.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

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
        """Return the token.

        Raises:
            OSError: the token file cannot be read.
        """
        return self.token if self.token_file is None else self.token_file.read_text(encoding="utf-8").strip()


def read_pod_environment(variables: Mapping[str, str]) -> PodEnvironment:
    """Read the environment variables of a pod agent.

    EBBTIDE_JOB_ID, EBBTIDE_NODE, EBBTIDE_URL, EBBTIDE_RUN_ROOT and one of EBBTIDE_TOKEN and EBBTIDE_TOKEN_FILE are
    required. EBBTIDE_CHECKPOINT_DIR, EBBTIDE_POD (default: random) and EBBTIDE_GRACE_S (default: 30) are optional.

    Raises:
        ValueError: a variable is missing or malformed; the message names it.
    """
    url = parse_url(_require(variables, "EBBTIDE_URL"))
    token_file = variables.get("EBBTIDE_TOKEN_FILE", "")
    return PodEnvironment(
        job_id=_require(variables, "EBBTIDE_JOB_ID"),
        node=_require(variables, "EBBTIDE_NODE"),
        url=url,
        token="" if token_file else _require(variables, "EBBTIDE_TOKEN", "EBBTIDE_TOKEN_FILE"),
        token_file=Path(token_file) if token_file else None,
        run_root=Path(_require(variables, "EBBTIDE_RUN_ROOT")),
        checkpoint_dir=variables.get("EBBTIDE_CHECKPOINT_DIR", ""),
        pod=variables.get("EBBTIDE_POD", "") or secrets.token_hex(8),
        grace_s=_parse_grace_s(variables, "EBBTIDE_GRACE_S", default=30.0),
    )


def _require(variables: Mapping[str, str], name: str, alternative: str = "") -> str:
    text = variables.get(name, "")
    if not text:
        raise ValueError(f"`{name}` is not set. Set it" + (f" or `{alternative}`." if alternative else "."))
    return text


def _parse_grace_s(variables: Mapping[str, str], name: str, *, default: float) -> float:
    text = variables.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"`{name}` is {text!r}. Use a number of seconds of 0 or more.")
    return seconds
