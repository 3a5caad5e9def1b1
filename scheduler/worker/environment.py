"""What the executor tells one rank through environment variables, checked once at the door.

What the agent of a pod is told through environment variables, checked once at the door.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The place of this process in its job. Without any variable it is a job of one rank that nobody watches."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: str = ""
    store_host: str = ""
    store_port: int = 0
    uses_agent_store: bool = False
    job_id: str = "local"
    generation: int = 0
    url: str = ""
    token: str = field(default="", repr=False)
    plan_path: Path | None = None
    checkpoint_dir: Path | None = None
    run_dir: Path | None = None
    steps_total: int = 0
    frozen_layers: int = 0
    checkpoint_step: int = 0
    checkpoint_interval_s: float = math.inf
    checkpoint_keep: int = 0

    @property
    def has_store(self) -> bool:
        return bool(self.store_host)


def read_rank_environment(variables: Mapping[str, str]) -> RankEnvironment:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and EBBTIDE_*; an empty value counts as absent.

    Raises:
        ValueError: a variable holds something else than it may; the message names it.
    """
    world_size = _parse_count(variables, "WORLD_SIZE", default=1, minimum=1)
    rank = _parse_count(variables, "RANK", default=0)
    if rank >= world_size:
        raise ValueError(f"RANK is {rank}, it must be below WORLD_SIZE, which is {world_size}")
    url = variables.get("EBBTIDE_URL", "")
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"EBBTIDE_URL is {url!r}, it must start with http:// or https://")
    store_host = variables.get("MASTER_ADDR", "")
    store_port = _parse_count(variables, "MASTER_PORT", default=0)
    if store_host and not 0 < store_port < 65536:
        raise ValueError(f"MASTER_PORT is {store_port}, beside MASTER_ADDR it must be 1 to 65535")
    if world_size > 1 and not store_host:
        raise ValueError(f"WORLD_SIZE is {world_size}, so MASTER_ADDR and MASTER_PORT must name the rendezvous store")
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_parse_count(variables, "LOCAL_RANK", default=0),
        node=variables.get("EBBTIDE_NODE", ""),
        store_host=store_host,
        store_port=store_port,
        uses_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job_id=variables.get("EBBTIDE_JOB_ID") or "local",
        generation=_parse_count(variables, "EBBTIDE_GENERATION", default=0),
        url=url.rstrip("/"),
        token=variables.get("EBBTIDE_TOKEN", ""),
        plan_path=_parse_path(variables, "EBBTIDE_PLAN"),
        checkpoint_dir=_parse_path(variables, "EBBTIDE_CHECKPOINT_DIR"),
        run_dir=_parse_path(variables, "EBBTIDE_RUN_DIR"),
        steps_total=_parse_count(variables, "EBBTIDE_STEPS", default=0),
        frozen_layers=_parse_count(variables, "EBBTIDE_FROZEN_LAYERS", default=0),
        checkpoint_step=_parse_count(variables, "EBBTIDE_CHECKPOINT_STEP", default=0),
        checkpoint_interval_s=_parse_interval_s(variables, "EBBTIDE_CHECKPOINT_INTERVAL_S"),
        checkpoint_keep=_parse_count(variables, "EBBTIDE_CHECKPOINT_KEEP", default=0),
    )


def _parse_count(variables: Mapping[str, str], name: str, *, default: int, minimum: int = 0) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise ValueError(f"{name} is {text!r}, it must be a whole number of at least {minimum}")
    return int(text)


def _parse_interval_s(variables: Mapping[str, str], name: str) -> float:
    """Infinite where nobody says."""
    text = variables.get(name) or "inf"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{name} is {text!r}, it must be a number of seconds above 0")
    return seconds


def _parse_path(variables: Mapping[str, str], name: str) -> Path | None:
    text = variables.get(name, "")
    return Path(text) if text else None


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


def read_pod_environment(variables: Mapping[str, str]) -> PodEnvironment:
    """Reads EBBTIDE_JOB_ID, EBBTIDE_NODE, EBBTIDE_URL, EBBTIDE_RUN_ROOT, EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE;
    EBBTIDE_CHECKPOINT_DIR, EBBTIDE_POD (default: drawn) and EBBTIDE_GRACE_S (30) may be left out.

    Raises:
        ValueError: a variable is missing or holds something else than it may; the message names it.
    """
    url = _require(variables, "EBBTIDE_URL")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"EBBTIDE_URL is {url!r}, it must start with http:// or https://")
    token_file = variables.get("EBBTIDE_TOKEN_FILE", "")
    return PodEnvironment(
        job_id=_require(variables, "EBBTIDE_JOB_ID"),
        node=_require(variables, "EBBTIDE_NODE"),
        url=url.rstrip("/"),
        token="" if token_file else _require(variables, "EBBTIDE_TOKEN", "or EBBTIDE_TOKEN_FILE"),
        token_file=Path(token_file) if token_file else None,
        run_root=Path(_require(variables, "EBBTIDE_RUN_ROOT")),
        checkpoint_dir=variables.get("EBBTIDE_CHECKPOINT_DIR", ""),
        pod=variables.get("EBBTIDE_POD", "") or secrets.token_hex(8),
        grace_s=_parse_grace_s(variables, "EBBTIDE_GRACE_S", default=30.0),
    )


def _require(variables: Mapping[str, str], name: str, alternative: str = "") -> str:
    text = variables.get(name, "")
    if not text:
        raise ValueError(f"{name} is missing" + (f", {alternative}" if alternative else ""))
    return text


def _parse_grace_s(variables: Mapping[str, str], name: str, *, default: float) -> float:
    text = variables.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {text!r}, it must be a number of seconds of at least 0")
    return seconds
