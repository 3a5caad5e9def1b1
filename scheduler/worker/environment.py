"""What the executor tells one rank through environment variables, checked once at the door."""

from __future__ import annotations

import math
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
    agent_store: bool = False
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


def rank_environment(variables: Mapping[str, str]) -> RankEnvironment:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and EBBTIDE_*; an empty value counts as absent.

    Raises:
        ValueError: a variable holds something else than it may; the message names it.
    """
    world_size = _count(variables, "WORLD_SIZE", default=1, least=1)
    rank = _count(variables, "RANK", default=0)
    if rank >= world_size:
        raise ValueError(f"RANK is {rank}, it must be below WORLD_SIZE, which is {world_size}")
    url = variables.get("EBBTIDE_URL", "")
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"EBBTIDE_URL is {url!r}, it must start with http:// or https://")
    store_host = variables.get("MASTER_ADDR", "")
    store_port = _count(variables, "MASTER_PORT", default=0)
    if store_host and not 0 < store_port < 65536:
        raise ValueError(f"MASTER_PORT is {store_port}, beside MASTER_ADDR it must be 1 to 65535")
    if world_size > 1 and not store_host:
        raise ValueError(f"WORLD_SIZE is {world_size}, so MASTER_ADDR and MASTER_PORT must name the rendezvous store")
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_count(variables, "LOCAL_RANK", default=0),
        node=variables.get("EBBTIDE_NODE", ""),
        store_host=store_host,
        store_port=store_port,
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job_id=variables.get("EBBTIDE_JOB_ID") or "local",
        generation=_count(variables, "EBBTIDE_GENERATION", default=0),
        url=url.rstrip("/"),
        token=variables.get("EBBTIDE_TOKEN", ""),
        plan_path=_path(variables, "EBBTIDE_PLAN"),
        checkpoint_dir=_path(variables, "EBBTIDE_CHECKPOINT_DIR"),
        run_dir=_path(variables, "EBBTIDE_RUN_DIR"),
        steps_total=_count(variables, "EBBTIDE_STEPS", default=0),
        frozen_layers=_count(variables, "EBBTIDE_FROZEN_LAYERS", default=0),
        checkpoint_step=_count(variables, "EBBTIDE_CHECKPOINT_STEP", default=0),
        checkpoint_interval_s=_seconds(variables, "EBBTIDE_CHECKPOINT_INTERVAL_S"),
        checkpoint_keep=_count(variables, "EBBTIDE_CHECKPOINT_KEEP", default=0),
    )


def _count(variables: Mapping[str, str], name: str, *, default: int, least: int = 0) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(f"{name} is {text!r}, it must be a whole number of at least {least}")
    return int(text)


def _seconds(variables: Mapping[str, str], name: str) -> float:
    """Infinite where nobody says."""
    text = variables.get(name) or "inf"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{name} is {text!r}, it must be a number of seconds above 0")
    return seconds


def _path(variables: Mapping[str, str], name: str) -> Path | None:
    text = variables.get(name, "")
    return Path(text) if text else None
