"""Environment variables of ranks, validated once at startup."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RankEnvironment:
    """The place of this process in its job. Without any variable it is the only rank of a job without an executor."""

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
    framework: str = ""
    checkpoint_dir: Path | None = None
    checkpoint_url: str = ""
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
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and EBBTIDE_*. An empty value counts as absent.

    Raises:
        ValueError: a variable is malformed; the message names it.
    """
    world_size = _parse_count(variables, "WORLD_SIZE", default=1, minimum=1)
    rank = _parse_count(variables, "RANK", default=0)
    if rank >= world_size:
        raise ValueError(f"`RANK` is {rank}, but `WORLD_SIZE` is {world_size}. Set `RANK` to 0 to {world_size - 1}.")
    url = variables.get("EBBTIDE_URL", "")
    checkpoints = variables.get("EBBTIDE_CHECKPOINT_DIR", "")
    store_host = variables.get("MASTER_ADDR", "")
    store_port = _parse_count(variables, "MASTER_PORT", default=0)
    if store_host and not 0 < store_port < 65536:
        raise ValueError(f"`MASTER_PORT` is {store_port}. With `MASTER_ADDR` it must be 1 to 65535.")
    if world_size > 1 and not store_host:
        raise ValueError(
            f"`WORLD_SIZE` is {world_size}, but `MASTER_ADDR` is not set. "
            "Set `MASTER_ADDR` and `MASTER_PORT` to the address of the rendezvous store."
        )
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
        url=parse_url(url) if url else "",
        token=variables.get("EBBTIDE_TOKEN", ""),
        plan_path=_parse_path(variables, "EBBTIDE_PLAN"),
        framework=variables.get("EBBTIDE_FRAMEWORK", ""),
        checkpoint_dir=Path(checkpoints) if checkpoints and "://" not in checkpoints else None,
        checkpoint_url=checkpoints if "://" in checkpoints else "",
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
        raise ValueError(f"`{name}` is {text!r}. Use an integer of {minimum} or more.")
    return int(text)


def _parse_interval_s(variables: Mapping[str, str], name: str) -> float:
    """Return the interval in seconds; infinite if the variable is absent."""
    text = variables.get(name) or "inf"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"`{name}` is {text!r}. Use a number of seconds above 0.")
    return seconds


def _parse_path(variables: Mapping[str, str], name: str) -> Path | None:
    text = variables.get(name, "")
    return Path(text) if text else None


def parse_url(text: str) -> str:
    """Return the URL of the control plane (EBBTIDE_URL) without a slash at its end.

    Raises:
        ValueError: it is no URL of HTTP or HTTPS.
    """
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"`EBBTIDE_URL` is {text!r}. Use a URL that starts with http:// or https://.")
    return text.rstrip("/")
