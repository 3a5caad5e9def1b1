"""The run document: all that a node agent needs to run its part of one generation of a job, as versioned JSON.

The control plane writes it, the agent stores it in the generation's folder, and the supervisor starts the ranks from
it. A reader refuses a version that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scheduler.domain.codec import decode_stored, encode
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.secret_reference import SecretReference

RUN_DOCUMENT_VERSION = 1
_NEWER_FIELDS = frozenset({"checkpoint_path", "checkpoint_signal", "framework", "owner_id"})


class LaunchMode(StrEnum):
    """What is started: one process per GPU, or one per node for a launcher such as torchrun."""

    RANK = "rank"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class RankSeat:
    """One rank on the agent's node: its number in the job, its number on the node, and its GPU there."""

    rank: int
    local_rank: int
    gpu: int


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of all processes of a generation on one node. None means no limit."""

    memory_bytes: int | None = None
    processes: int | None = None
    cpus: float | None = None

    def with_defaults(self, defaults: ResourceLimits) -> ResourceLimits:
        """Return these limits, with the defaults where there is none."""
        return ResourceLimits(
            memory_bytes=defaults.memory_bytes if self.memory_bytes is None else self.memory_bytes,
            processes=defaults.processes if self.processes is None else self.processes,
            cpus=defaults.cpus if self.cpus is None else self.cpus,
        )


@dataclass(frozen=True, slots=True)
class RunDocument:
    """One generation of a job on one node.

    Args:
        owner: name of the caller that submitted the job; of an OIDC subject, whose name anybody may have, the id.
        owner_id: stable id of that caller. The agent maps it, or else `owner`, to a user of its machine.
        node_rank: number of this node among the `nodes` of the generation, in the order of their first ranks.
        ranks: the ranks on this node.
        has_devices: whether the GPUs of the ranks are devices. False: they are slots that share the processors.
        plan: the parallel plan, or None for a job without one.
        framework: training framework in whose words the command gets the plan, or empty.
        archive: digest of the working directory's archive (`sha256:<hex>`), or empty.
        archive_bytes_max: limit of uploaded archives, from which that of the unpacked files follows. None: the default.
        setup: command that runs once per machine in a new working directory, before any rank. Empty for none.
        venv: virtual environment whose `python` is first on PATH, or empty for the PATH of the machine.
        checkpoint_dir: directory or object store for checkpoints; empty lets the agent choose a directory.
        checkpoint_interval_s: longest time between two checkpoints in seconds, or None for no limit.
        checkpoint_path: pattern of the checkpoints that a script without a session writes, in `checkpoint_dir`.
        checkpoint_signal: signal on which it writes one, or empty.
        hang_timeout_s: time without progress after which the run counts as hung. None: never.
        secrets: references to secrets. The agent fetches the values and stores them outside of this document.
        url, token: the API for the ranks' progress reports, and the token of this generation.
    """

    job_id: str
    owner: str
    node: str
    generation: int
    command: tuple[str, ...]
    nodes: int
    node_rank: int
    world_size: int
    ranks: tuple[RankSeat, ...]
    launch: LaunchMode = LaunchMode.RANK
    has_devices: bool = True
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    plan: ParallelPlan | None = None
    archive: str = ""
    archive_bytes_max: int | None = None
    setup: tuple[str, ...] = ()
    venv: str = ""
    steps: int = 0
    frozen_layers: int = 0
    checkpoint_dir: str = ""
    checkpoint_step: int = 0
    checkpoint_interval_s: float | None = None
    checkpoint_keep: int = 1
    url: str = ""
    token: str = field(default="", repr=False)
    limits: ResourceLimits = ResourceLimits()
    hang_timeout_s: float | None = None
    secrets: tuple[SecretReference, ...] = ()
    framework: str = ""
    checkpoint_path: str = ""
    checkpoint_signal: str = ""
    owner_id: str = ""

    def to_json(self) -> str:
        return json.dumps(self.to_document())

    @classmethod
    def from_json(cls, text: str) -> RunDocument:
        """Read a document that `to_json` wrote. Raises ValueError as `from_document`."""
        return cls.from_document(json.loads(text))

    def to_document(self) -> dict[str, Any]:
        """Return the document as JSON values. Newer fields are left out where empty, for agents that lack them."""
        values = {name: value for name, value in encode(self).items() if value or name not in _NEWER_FIELDS}
        return {"version": RUN_DOCUMENT_VERSION, **values}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> RunDocument:
        """Read a document. Fields that a newer control plane added are ignored.

        Raises:
            ValueError: it is malformed, or of another version.
        """
        version = document.get("version")
        if version != RUN_DOCUMENT_VERSION:
            raise ValueError(
                f"version: the run document has version {version!r}; this agent reads {RUN_DOCUMENT_VERSION}. "
                "Use an agent of the control plane's version."
            )
        return decode_stored(cls, {name: value for name, value in document.items() if name != "version"})


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Where the ranks of a generation meet: the machine of rank 0 and a port that is reserved there."""

    host: str
    port: int
