"""Documents of machines for the REST API: join tokens, joins and inventories."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scheduler.documents.document import Document, InvalidDocumentError, InvalidField, Label, Text
from scheduler.documents.fleet import NODE_GPUS_MAX, HostName
from scheduler.domain.codec import decode
from scheduler.domain.machine import LinkKind, MachineInventory

TOKEN_USES_MAX = 10_000
TOKEN_LIFETIME_S = 3600.0
TOKEN_LIFETIME_S_MAX = 7 * 86_400.0
RESERVED_NAMES = frozenset({"tokens"})
"""Names that are paths of other resources."""
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
ShortText = Annotated[Text, Field(max_length=300)]


class JoinTokenDocument(Document):
    """A join token to create."""

    pool: Label = Field(description="Existing pool that machines join with the token.")
    uses: Annotated[int, Field(strict=True, ge=1, le=TOKEN_USES_MAX)] = Field(
        default=1, description="How many machines may join with it."
    )
    expires_in_s: Annotated[float, Field(gt=0, le=TOKEN_LIFETIME_S_MAX)] = Field(
        default=TOKEN_LIFETIME_S, description="Lifetime in seconds, at most a week. Default: one hour."
    )


class GpuDeviceDocument(Document):
    """One GPU as its driver reports it. 0 and the empty string mean that a value is unknown."""

    index: Annotated[int, Field(strict=True, ge=0, lt=NODE_GPUS_MAX)] = Field(
        description="Number of the GPU on the machine, from 0 without gaps."
    )
    name: Annotated[ShortText, Field(min_length=1)] = Field(
        description="Product, such as `NVIDIA A100-SXM4-80GB`, or a profile such as `a100-80g`."
    )
    uuid: ShortText = Field(default="", description="Identifier that the driver gives to the GPU for its lifetime.")
    memory_bytes: Count = Field(description="Total memory of the GPU, in bytes. 0: that of its profile.")
    architecture: ShortText = Field(default="", description="Compute capability such as `8.0`, or `gfx942`.")
    cores: Count = Field(default=0, description="Number of CUDA cores or stream processors.")
    clock_hz: Count = Field(default=0, description="Highest frequency of the cores, in cycles per second.")
    memory_clock_hz: Count = Field(default=0, description="Highest frequency of the memory, in cycles per second.")
    memory_bus_bits: Count = Field(default=0, description="Width of the path to the memory, in lines.")
    power_watts: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=0.0, description="Limit of the driver, in watts."
    )
    nvlinks: Count = Field(default=0, description="Number of active links to other GPUs or switches.")
    pcie_generation: Annotated[Count, Field(le=16)] = Field(
        default=0, description="Highest version that the slot runs."
    )
    pcie_lanes: Annotated[Count, Field(le=64)] = Field(default=0, description="Most lanes that the slot runs.")
    minor: Count | None = Field(
        default=None, description="Number in the name of its device node, such as 0 in `/dev/nvidia0`. Null: unknown."
    )
    capability_minors: Annotated[list[Count], Field(max_length=16)] = Field(
        default=[], description="Device nodes below `/dev/nvidia-caps` that permit the use of a MIG instance."
    )


class GpuLinkDocument(Document):
    """The path between two GPUs of a machine."""

    first: Count = Field(description="Index of one GPU.")
    second: Count = Field(description="Index of the other GPU.")
    kind: LinkKind = Field(description="What the fastest path between both traverses.")


class NetworkInterfaceDocument(Document):
    """A network interface that is up."""

    name: ShortText = Field(description="As the operating system calls it, such as `eth0`.")
    speed_bits_per_s: Count = Field(default=0, description="Link rate in bits per second. 0: unknown.")


class CheckpointPathDocument(Document):
    """Whether the agent can use a directory for checkpoints."""

    path: Text = Field(description="Absolute name of the directory.")
    exists: bool = Field(description="Whether the machine has this directory.")
    writable: bool = Field(description="Whether the agent could create a file there.")
    free_bytes: Count = Field(description="Space that is left on its file system, in bytes.")


class InventoryDocument(Document):
    """Hardware of a machine as its agent detected it."""

    hostname: ShortText = Field(default="", description="What the machine calls itself.")
    addresses: Annotated[list[ShortText], Field(max_length=256)] = Field(
        default=[], description="IP addresses of its interfaces, except loopback."
    )
    cpus: Count = Field(default=0, description="Number of logical processors.")
    memory_bytes: Count = Field(default=0, description="Size of the main memory, in bytes.")
    gpus: Annotated[list[GpuDeviceDocument], Field(max_length=NODE_GPUS_MAX)] = Field(
        default=[], description="All GPUs, of one model, in the order of their indices."
    )
    links: Annotated[list[GpuLinkDocument], Field(max_length=8192)] = Field(
        default=[], description="Topology: one entry per pair of GPUs."
    )
    nics: Annotated[list[NetworkInterfaceDocument], Field(max_length=256)] = Field(
        default=[], description="Network interfaces that are up, except loopback."
    )
    checkpoint_paths: Annotated[list[CheckpointPathDocument], Field(max_length=64)] = Field(
        default=[], description="Directories that the operator named for checkpoints."
    )
    overrides: Annotated[list[ShortText], Field(max_length=16)] = Field(
        default=[], description="Values that the operator stated instead of the driver: `gpus`, `gpu`, `gpu_memory`."
    )


class MachineFactsDocument(Document):
    """What an agent states of its machine when it joins, and again when it starts."""

    address: Annotated[ShortText, Field(min_length=1)] = Field(
        description="Host name or IP address at which ranks on other machines reach it."
    )
    version: Annotated[ShortText, Field(min_length=1)] = Field(
        description="Release of the agent. Major and minor number must be those of the service."
    )
    clock_s: Annotated[float, Field(ge=0)] = Field(
        description="Time of the machine in seconds since 1970 (UTC), at most 60 s from that of the service."
    )
    containment: ShortText = Field(default="", description="Level of isolation of ranks that the agent states.")
    gpu: ShortText = Field(
        default="", description="Profile or product to use instead of the reported product. Empty: the reported one."
    )
    inventory: InventoryDocument = Field(description="Detected hardware, with at least one GPU.")


class JoinDocument(MachineFactsDocument):
    """A machine that asks to join. The token decides the pool."""

    name: HostName = Field(description="Unique name of the machine and of the node that it hosts.")
    temporary: bool = Field(
        default=False,
        description="Whether the machine leaves for good, such as one of a Slurm allocation. It is then removed with "
        "its node once it has left or is silent for `EBBTIDE_TEMPORARY_MACHINE_S`.",
    )


def to_inventory(document: InventoryDocument, *, may_lack_gpus: bool = False) -> MachineInventory:
    """Convert an inventory.

    Raises:
        InvalidDocumentError: there is no GPU, there are GPUs of several models, or the indices have gaps.
    """
    names = {gpu.name for gpu in document.gpus}
    if len(names) != 1 and (names or not may_lack_gpus):
        given = f"{len(names)} GPU models" if names else "no GPU"
        allowed = "one or more GPUs of one model. State them with --gpus, --gpu and --gpu-memory if none is detected"
        raise InvalidDocumentError(InvalidField("inventory.gpus", given, allowed))
    indices = [gpu.index for gpu in document.gpus]
    if indices != list(range(len(indices))):
        raise InvalidDocumentError(InvalidField("inventory.gpus.index", str(indices), "0, 1, 2 and so on, in order"))
    return decode(MachineInventory, document.model_dump(mode="json"))
