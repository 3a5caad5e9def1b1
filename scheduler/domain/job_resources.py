"""Memory and cores that a job may use: limits of its runs on machines, and of the container of its pods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from scheduler.domain.quantities import CPU
from scheduler.domain.run_document import ResourceLimits

MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class JobResources:
    """Memory and cores of a job on each of its nodes, or for each GPU there. None: the job states none."""

    memory_bytes: int | None = None
    cpus: float | None = None

    def limit_node(self, factor: int) -> ResourceLimits:
        """Return the limits of a run on one node, this many times the stated ones."""
        return ResourceLimits(
            memory_bytes=None if self.memory_bytes is None else factor * self.memory_bytes,
            cpus=None if self.cpus is None else factor * self.cpus,
        )

    def add_to_template(self, template_json: str) -> str:
        """Return the pod template whose first container has these limits, which Kubernetes also requests for it.

        `template_json` is empty for a job without a template.
        """
        limits = {}
        if self.memory_bytes is not None:
            limits[MEMORY] = str(self.memory_bytes)
        if self.cpus is not None:
            limits[CPU] = f"{max(1, round(1000 * self.cpus))}m"
        if not limits:
            return template_json
        template: dict[str, Any] = json.loads(template_json) if template_json else {"spec": {"containers": [{}]}}
        container = template["spec"]["containers"][0]
        resources = container.get("resources") or {}
        container["resources"] = {**resources, "limits": {**(resources.get("limits") or {}), **limits}}
        return json.dumps(template, sort_keys=True, separators=(",", ":"))


NO_RESOURCES = JobResources()
