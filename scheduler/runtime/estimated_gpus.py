"""Estimated GPU profiles in the database: storing them, and making them known to this process when a node needs one."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from scheduler.domain.fleet import Node
from scheduler.domain.machine import EstimatedGpu
from scheduler.domain.snapshot import Snapshot
from scheduler.solver.profiles.catalog import add_estimated_gpus, list_gpu_names
from scheduler.store.api_protocol import ApiStore, MachineStore


class EstimatedGpuLoader:
    """Reads the estimated profiles when a snapshot has a node of a GPU model without a profile. Thread-safe."""

    def __init__(self, store: ApiStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._nodes: Mapping[str, Node] = {}
        self._known: set[str] = set()

    def load_for(self, snapshot: Snapshot) -> None:
        """Make the profiles of all its nodes known, if they are stored. Cheap if no GPU model is new."""
        if snapshot.nodes is self._nodes:
            return
        with self._lock:
            unknown = {node.gpu for node in snapshot.nodes.values()} - self._known
            if unknown:
                self._known = set(list_gpu_names())
                unknown -= self._known
            if unknown:
                load_estimated_gpus(self._store.machines)
                self._known = set(list_gpu_names())
                unknown -= self._known
            if not unknown:
                self._nodes = snapshot.nodes


def load_estimated_gpus(machines: MachineStore) -> None:
    """Make all stored profiles known to this process."""
    add_estimated_gpus({each.name: each.profile_json for each in machines.list_estimated_gpus()})


def save_estimated_gpus(machines: MachineStore, profiles: Mapping[str, str], *, origin: str, now_s: float) -> None:
    """Store profiles, as JSON text by name, and make them known to this process. The first one of a name stays.

    Args:
        origin: the machine or the component that the facts come from.
    """
    for name, text in profiles.items():
        machines.add_estimated_gpu(EstimatedGpu(name, text, origin, now_s))
    load_estimated_gpus(machines)
