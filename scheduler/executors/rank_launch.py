"""Command line and environment of ranks and agents, as data. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.domain.gpu_sets import RankPlacement

RUN_ROOT_VARIABLE = "EBBTIDE_RUN_ROOT"
RUN_DIR_VARIABLE = "EBBTIDE_RUN_DIR"
"""Marks by which a controller finds its processes: per run root, and per generation."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_RUN_DIR_BYTES = 4096
_NOT_INHERITED = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})
_NOT_INHERITED_PREFIXES = ("EBBTIDE_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True)
class RankSlot:
    """Position of a rank: its index among the job's ranks on `node`, and its GPU there."""

    rank: int
    local_rank: int
    node: str
    gpu: int


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Launch parameters shared by all ranks of a generation. Relative paths start at the working directory."""

    job_id: str
    generation: int
    world_size: int
    steps: int
    store_host: str
    store_port: int
    run_root: str
    run_dir: str
    plan_path: str
    checkpoint_dir: str
    url: str = ""
    token: str = field(default="", repr=False)
    frozen_layers: int = 0
    checkpoint_step: int = 0
    checkpoint_interval_s: float = math.inf
    checkpoint_keep: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


def assign_rank_slots(seats: RankPlacement) -> tuple[RankSlot, ...]:
    """Return the slot of each rank. Ranks on a node are numbered in order."""
    counts, places = Counter[str](), list[RankSlot]()
    for rank, (node, gpu) in enumerate(seats):
        places.append(RankSlot(rank, counts[node], node, gpu))
        counts[node] += 1
    return tuple(places)


def build_argv(command: Sequence[str], *, python: str) -> tuple[str, ...]:
    """Return the command to execute. A leading `python` becomes the interpreter `python`.

    Raises:
        ValueError: the job has no command.
    """
    if not command:
        raise ValueError("the job has no command. Set command to run it on this machine.")
    return (python, *command[1:]) if command[0] == "python" else tuple(command)


def can_run_preloaded(command: Sequence[str]) -> bool:
    """Return whether ranks may be forked from the agent: only `python -m` of the reference trainer.

    A forked rank has Ebbtide's packages in `sys.modules`. Any other program may have a `scheduler` or an `api` of its
    own.
    """
    match command:
        case ["python", "-m", module, *_]:
            return f"{module}.".startswith("scheduler.trainer.")
    return False


def build_agent_environment(
    job_env: Mapping[str, str], *, run_root: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a node agent.

    They include those of its ranks, because preloaded modules read them only once. A placeholder of PATH_MAX bytes
    leaves room for the mark of a generation, which forked ranks write in place.
    """
    marks = {RUN_ROOT_VARIABLE: run_root, RUN_DIR_VARIABLE: "-" * _RUN_DIR_BYTES}
    return {**_ONE_THREAD, **filter_inherited(inherited), **job_env, **marks}


def build_rank_environment(spec: LaunchSpec, placement: RankSlot, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one rank: inherited ones, then the job's, then those that Ebbtide sets.

    The controller's EBBTIDE_* settings are not inherited. Numeric libraries default to one thread, because ranks share
    the machine.
    """
    contract = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "MASTER_ADDR": spec.store_host,
        "MASTER_PORT": str(spec.store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "EBBTIDE_NODE": placement.node,
        "EBBTIDE_JOB_ID": spec.job_id,
        "EBBTIDE_GENERATION": str(spec.generation),
        "EBBTIDE_URL": spec.url,
        "EBBTIDE_TOKEN": spec.token,
        "EBBTIDE_PLAN": spec.plan_path,
        "EBBTIDE_CHECKPOINT_DIR": spec.checkpoint_dir,
        RUN_DIR_VARIABLE: spec.run_dir,
        "EBBTIDE_STEPS": str(spec.steps),
        "EBBTIDE_FROZEN_LAYERS": str(spec.frozen_layers),
        "EBBTIDE_CHECKPOINT_STEP": str(spec.checkpoint_step),
        "EBBTIDE_CHECKPOINT_INTERVAL_S": str(spec.checkpoint_interval_s),
        "EBBTIDE_CHECKPOINT_KEEP": str(spec.checkpoint_keep),
        RUN_ROOT_VARIABLE: spec.run_root,
    }
    return {**_ONE_THREAD, **filter_inherited(inherited), **spec.env, **contract}


def filter_inherited(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that child processes inherit."""
    return {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIXES)
    }
