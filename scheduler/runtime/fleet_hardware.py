"""Makes the hardware that a snapshot describes known to this process: set GPU profiles, networks and estimates."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.domain.fleet import Node, Pool
from scheduler.domain.hardware import FleetHardware, GpuProfile, collect_fleet_hardware
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.estimated_gpus import EstimatedGpuLoader, load_estimated_gpus
from scheduler.solver.profiles.fleet_hardware import get_fleet_hardware, use_fleet_hardware
from scheduler.store.api_protocol import ApiStore


class FleetHardwareLoader:
    """Follows the hardware of the newest snapshot. Cheap if neither profiles, pools nor nodes changed."""

    def __init__(self, store: ApiStore) -> None:
        self._store = store
        self._estimated_gpus = EstimatedGpuLoader(store)
        self._read: tuple[Mapping[str, GpuProfile], Mapping[str, Pool], Mapping[str, Node]] | None = None
        self._hardware = FleetHardware()

    def load_for(self, snapshot: Snapshot) -> None:
        """Make the profiles and networks of a snapshot the ones from which this process plans."""
        self._estimated_gpus.load_for(snapshot)
        read = snapshot.gpu_profiles, snapshot.pools, snapshot.nodes
        if self._read is None or any(new is not old for new, old in zip(read, self._read, strict=True)):
            found = collect_fleet_hardware(snapshot.gpu_profiles, snapshot.pools, snapshot.nodes.values())
            if self._hardware.profiles.keys() - found.profiles.keys():
                load_estimated_gpus(self._store.machines)  # the estimate of a deleted profile counts again
            # An equal value is kept, so that what was computed from it stays valid.
            self._hardware = self._hardware if found == self._hardware else found
            self._read = read
        if get_fleet_hardware() is not self._hardware:
            use_fleet_hardware(self._hardware)
