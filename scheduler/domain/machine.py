"""Machines that run a node agent, what they report of their hardware, and the tokens with which they join."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from scheduler.domain.fleet import PROCESSOR_SLOTS, Node

MACHINE_CREDENTIAL_PREFIX = "ebm_"
JOIN_TOKEN_PREFIX = "ebj_"
CLOCK_SKEW_S_MAX = 60.0
"""Largest accepted difference between the clocks of a joining machine and of the service: the age of reports, leases
and deadlines are compared across both."""


class LinkKind(StrEnum):
    """Fastest path between two GPUs of a machine, fastest first. PCIe paths are named after what they traverse."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    PCIE_SWITCH = "pcie-switch"
    PCIE_HOST = "pcie-host"
    NUMA_NODE = "numa-node"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU as its driver reports it. 0 and the empty string mean that a value is unknown.

    Args:
        index: number of the GPU on the machine, in the driver's order.
        name: product name, such as "NVIDIA A100-SXM4-80GB".
        architecture: compute capability such as "8.0", or "gfx942" of an AMD GPU.
        cores: CUDA cores, or stream processors of an AMD GPU.
        clock_hz: highest clock of the cores. `memory_clock_hz` is that of the memory, which moves 2 bits per cycle
            and line of a bus of `memory_bus_bits`.
        power_watts: power limit.
        nvlinks: active links to other GPUs or switches.
        pcie_generation, pcie_lanes: of the slot, at most.
        minor: number of its device node, such as 0 of `/dev/nvidia0` and 128 of `/dev/dri/renderD128`; None: unknown.
        capability_minors: numbers of the device nodes that permit the use of a MIG instance.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int
    architecture: str = ""
    cores: int = 0
    clock_hz: int = 0
    memory_clock_hz: int = 0
    memory_bus_bits: int = 0
    power_watts: float = 0.0
    nvlinks: int = 0
    pcie_generation: int = 0
    pcie_lanes: int = 0
    minor: int | None = None
    capability_minors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuLink:
    """The path between the GPUs with the indices `first` and `second`."""

    first: int
    second: int
    kind: LinkKind


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """A network interface that is up, except loopback. A speed of 0 is unknown, as of most virtual interfaces."""

    name: str
    speed_bits_per_s: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Whether the agent can use a directory for checkpoints."""

    path: str
    exists: bool
    writable: bool
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MachineInventory:
    """Hardware of a machine as its agent detected it.

    `overrides` names the GPU fields that the operator stated instead: "gpus", "gpu" and "gpu_memory".
    """

    hostname: str = ""
    addresses: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    gpus: tuple[GpuDevice, ...] = ()
    links: tuple[GpuLink, ...] = ()
    nics: tuple[NetworkInterface, ...] = ()
    checkpoint_paths: tuple[CheckpointPath, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that joined a pool, with its agent. Times are Unix seconds.

    Args:
        name: unique; also the name of the node that it hosts, unless it is the service's own machine.
        gpu: name of the profile of its GPUs.
        address: where ranks on other machines reach it.
        containment: the level of isolation that the agent states, in its own words.
        digest: SHA-256 of the credential in hexadecimal.
        seen_at_s: time of the last recorded report; None before the first.
        is_service: whether the machine belongs to the service itself. It hosts all nodes that were declared by hand
            (`host_declared_nodes`), and has joined no pool.
        is_temporary: whether the machine leaves for good, such as one of a Slurm allocation. Once it has left or was
            silent for long, it is removed together with its node.
    """

    name: str
    nodes: tuple[str, ...]
    pool: str
    gpu: str
    address: str
    agent_version: str
    joined_at_s: float
    containment: str = ""
    inventory: MachineInventory = MachineInventory()
    digest: str = field(default="", repr=False)
    seen_at_s: float | None = None
    revoked_at_s: float | None = None
    is_service: bool = False
    is_temporary: bool = False

    @property
    def is_live(self) -> bool:
        return self.revoked_at_s is None


def host_declared_nodes(machines: Sequence[Machine], nodes: Iterable[str]) -> tuple[Machine, ...]:
    """Return the machines, with all nodes that no other machine hosts on the service's own machine.

    If several services share the database, these nodes are on the machine of the first.
    """
    own = min((each for each in machines if each.is_service), key=lambda each: each.joined_at_s, default=None)
    if own is None:
        return tuple(machines)
    hosted = {node for each in machines for node in each.nodes}
    declared = tuple(sorted(node for node in nodes if node not in hosted))
    return tuple(replace(each, nodes=declared) if each is own else each for each in machines)


def has_devices_for(machine: Machine, node: Node) -> bool:
    """Return whether a machine has the devices of a node that was declared by hand. Processor slots need none."""
    return node.gpu == PROCESSOR_SLOTS or 0 < node.gpus <= len(machine.inventory.gpus)


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token with which `uses_left` more machines may join a pool until it expires. Times are Unix seconds.

    Args:
        digest: SHA-256 of the secret in hexadecimal.
    """

    id: str
    digest: str = field(repr=False)
    pool: str
    uses_left: int
    created_at_s: float
    created_by: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class EstimatedGpu:
    """A GPU profile that was derived from what a machine reported, as JSON text. It never changes."""

    name: str
    profile_json: str
    machine: str
    created_at_s: float
