"""Whether a job's checkpoints outlive its pods: what was saved in a pod alone is lost with it, and nobody's work is to
be lost without a word."""

from __future__ import annotations

import json
import posixpath
from functools import lru_cache

from scheduler.documents.pod_template import CHECKPOINT_DIR, first_mounts, volume_sources
from scheduler.domain.job import CheckpointSpec, JobSpec
from scheduler.k8s.resources.conditions import CHECKPOINTS_SHARED, Claim

_OF_A_POD = ("configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "projected", "secret")
_OF_NOBODY_KNOWS = ("csi", "flexVolume", "hostPath")
_REMEDY = "give checkpoint.volume a persistentVolumeClaim that all nodes can mount"


def checkpoints_shared(spec: JobSpec) -> Claim:
    """The condition CheckpointsShared: all pods of the job find what any of them saved, now and later."""
    return _claim(spec.checkpoint, spec.template_json)


@lru_cache(maxsize=4096)
def _claim(checkpoint: CheckpointSpec, template_json: str) -> Claim:
    place, volume = checkpoint.dir or CHECKPOINT_DIR, checkpoint.volume
    if volume is not None:
        folder = volume.sub_path or "a folder of the job's own"
        return Claim(CHECKPOINTS_SHARED, True, "ClaimMounted", f"{place} is {folder} in claim {volume.claim}")
    name, kind = _template_volume(place, template_json)
    if kind in _OF_NOBODY_KNOWS:
        why = f"{place} is in {name} of the template ({kind}): shared if all nodes find the same files there"
        return Claim(CHECKPOINTS_SHARED, None, "NodesDecide", why)
    if kind and kind not in _OF_A_POD:
        return Claim(CHECKPOINTS_SHARED, True, "TemplateMounts", f"{place} is in {name} of the template ({kind})")
    got = f"{place} is in {name} of the template ({kind})" if kind else f"nothing is mounted at {place}"
    lost = "checkpoints are lost with the pod that wrote them, and its work with them"
    return Claim(CHECKPOINTS_SHARED, False, "InPodsOnly", f"{got}: {lost}; {_REMEDY}")


def _template_volume(place: str, template_json: str) -> tuple[str, str]:
    """The volume of the template that the folder is in, and its kind; empty where there is none."""
    if not template_json:
        return "", ""
    template = json.loads(template_json)
    mounts, path = first_mounts(template), posixpath.normpath(place)
    while path not in mounts and path != posixpath.dirname(path):
        path = posixpath.dirname(path)
    name = mounts.get(path, "")
    return name, volume_sources(template).get(name, "")
