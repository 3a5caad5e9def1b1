"""Environment variables of the agent in a pod, validated once at its start, and its identity to the control plane."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from ebbtide.environment import parse_url
from scheduler.agent.joining import find_address

_DEFAULT_GRACE_S = 30.0
CERTIFICATE_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
)
"""Where distributions have their certificate authorities: Debian and Alpine, Red Hat, Alpine, SUSE."""


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """Settings of the agent in a pod.

    Args:
        token_file: read again for each connection, so that the token can be rotated.
        state: folder of the agent's state, on a volume of the pod.
        checkpoint_dir: where checkpoints are mounted, empty without a volume.
        pod: tells this agent from earlier and later ones on its node.
        address: where ranks in other pods reach this one; empty for the address that reaches the control plane.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    job_id: str
    node: str
    url: str
    token_file: Path
    state: Path
    checkpoint_dir: str
    pod: str
    address: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The identity of a pod to the control plane. `address` is where ranks in other pods reach this one."""

    job_id: str
    node: str
    pod: str
    address: str
    url: str
    token_file: Path

    @classmethod
    def of(cls, environment: PodEnvironment) -> PodIdentity:
        """Return the identity. Raises OSError if no address reaches the control plane."""
        return cls(
            job_id=environment.job_id,
            node=environment.node,
            pod=environment.pod,
            address=environment.address or find_address(environment.url),
            url=environment.url,
            token_file=environment.token_file,
        )

    @property
    def report_path(self) -> str:
        return f"/v1/jobs/{quote(self.job_id, safe='')}/agents/{quote(self.node, safe='')}"

    def archive_path(self, digest: str, job_id: str) -> str:
        return f"/v1/archives/{digest}?{urlencode({'job': job_id})}"

    def read_token(self) -> str:
        return self.token_file.read_text(encoding="utf-8").strip()

    def describe_agent(self) -> Mapping[str, Any]:
        return {"pod": self.pod, "address": self.address}


def find_certificates() -> dict[str, str]:
    """Return the variable with the image's certificate authorities, if the agent's OpenSSL does not find them.

    That OpenSSL comes with the agent, and looks where the distribution that it was built on has them.
    """
    found = ssl.get_default_verify_paths()
    if any((found.cafile, found.capath)):
        return {}
    return next(({"SSL_CERT_FILE": path} for path in CERTIFICATE_FILES if Path(path).is_file()), {})


def read_pod_environment(variables: Mapping[str, str]) -> PodEnvironment:
    """Read the environment variables of the agent in a pod.

    EBBTIDE_JOB_ID, EBBTIDE_NODE, EBBTIDE_POD, EBBTIDE_URL, EBBTIDE_RUN_ROOT and EBBTIDE_TOKEN_FILE are required.
    EBBTIDE_CHECKPOINT_DIR, EBBTIDE_ADDRESS and EBBTIDE_GRACE_S (default: 30) are optional.

    Raises:
        ValueError: a variable is missing or malformed; the message names it.
    """
    return PodEnvironment(
        job_id=_require(variables, "EBBTIDE_JOB_ID"),
        node=_require(variables, "EBBTIDE_NODE"),
        url=parse_url(_require(variables, "EBBTIDE_URL")),
        token_file=Path(_require(variables, "EBBTIDE_TOKEN_FILE")),
        state=Path(_require(variables, "EBBTIDE_RUN_ROOT")),
        checkpoint_dir=variables.get("EBBTIDE_CHECKPOINT_DIR", ""),
        pod=_require(variables, "EBBTIDE_POD"),
        address=variables.get("EBBTIDE_ADDRESS", ""),
        grace_s=_parse_grace_s(variables.get("EBBTIDE_GRACE_S", "")),
    )


def _require(variables: Mapping[str, str], name: str) -> str:
    text = variables.get(name, "")
    if not text:
        raise ValueError(f"`{name}` is not set. Set it.")
    return text


def _parse_grace_s(text: str) -> float:
    try:
        seconds = float(text) if text else _DEFAULT_GRACE_S
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"`EBBTIDE_GRACE_S` is {text!r}. Use a number of seconds of 0 or more.")
    return seconds
