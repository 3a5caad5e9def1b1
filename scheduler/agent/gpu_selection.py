"""The GPUs of this machine as its ranks select and open them: by vendor, identifier and device nodes."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from scheduler.agent.containment import list_gpu_devices
from scheduler.agent.rank_environment import GpuVendor
from scheduler.domain.machine import GpuDevice

logger = logging.getLogger(__name__)

_FIRST_MINOR = {GpuVendor.NVIDIA: 0, GpuVendor.AMD: 128, GpuVendor.ASCEND: 0}
"""Number of the first GPU's device node, for GPUs whose number the driver does not report."""


class MachineGpus:
    """The GPUs of a machine, all of one model. `vendor` is None if no driver has them, as for stated CPU slots.

    Ranks select GPUs by the identifiers that the driver gives them for their lifetime. GPUs of other makers than NVIDIA
    may have none and are selected by index then. So ranks see the device nodes of all GPUs, because indices count the
    GPUs that are visible.
    """

    def __init__(self, gpus: Sequence[GpuDevice]) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self.vendor = find_vendor(gpus[0]) if gpus else None
        self._has_ids = self.vendor in (None, GpuVendor.NVIDIA) or all(gpu.uuid for gpu in gpus)
        if not self._has_ids:
            logger.warning("a GPU has no identifier: GPUs are selected by index, and each job sees all device nodes")

    @property
    def ids(self) -> Mapping[int, str]:
        """The identifiers of the GPUs by index, without GPUs that no driver has."""
        if self.vendor is None:
            return {}
        ids = {gpu.index: gpu.uuid if self._has_ids else str(gpu.index) for gpu in self._gpus.values()}
        return {index: identifier for index, identifier in ids.items() if identifier}

    def list_devices(self, chosen: Collection[int], *, dev: Path = Path("/dev")) -> tuple[Path, ...]:
        """Return the device nodes that a job on the chosen GPUs needs."""
        if self.vendor is None:
            return ()
        gpus = [gpu for gpu in self._gpus.values() if gpu.index in chosen or not self._has_ids]
        first = _FIRST_MINOR[self.vendor]
        return list_gpu_devices(
            self.vendor,
            [first + gpu.index if gpu.minor is None else gpu.minor for gpu in gpus],
            capability_minors=[minor for gpu in gpus for minor in gpu.capability_minors],
            dev=dev,
        )


def find_vendor(gpu: GpuDevice) -> GpuVendor | None:
    """Return the maker of a GPU by what its driver or the operator states. None: no driver has it."""
    if gpu.architecture.startswith("gfx") or (gpu.uuid and gpu.name.startswith("AMD")):
        return GpuVendor.AMD
    if gpu.name.lower().startswith("ascend"):
        return GpuVendor.ASCEND
    if re.fullmatch(r"\d+\.\d+", gpu.architecture) or gpu.uuid:
        return GpuVendor.NVIDIA
    return None
