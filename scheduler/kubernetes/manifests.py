"""Manifests of a job's objects: agent pods, headless service, plan and agent token. Pure.

A pod fixes the node and the number of GPUs. Its agent asks the API for ranks, plan and generation, so a pod can serve
several generations unchanged.
"""

from __future__ import annotations

import base64
import copy
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.documents.pod_template import CHECKPOINT_DIR, PLAN_DIR, RUN_ROOT, SHM_DIR, TOKEN_DIR
from scheduler.domain.job import Job
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.domain.pod_requirements import PER_GPU
from scheduler.domain.quantities import multiply_quantity
from scheduler.kubernetes.agent_injection import (
    AGENT_COMMAND,
    AgentImage,
    build_agent_mount,
    build_agent_volume,
    build_init_containers,
)
from scheduler.kubernetes.api_objects import (
    CONFIG_MAP,
    ELASTIC_JOB,
    EPOCH_ANNOTATION,
    GENERATION_LABEL,
    GPU_RESOURCE,
    GPUS_ANNOTATION,
    JOB_LABEL,
    LABEL_MAX_LENGTH,
    LOANED_TAINT,
    MANAGED_BY_LABEL,
    NODE_LABEL,
    POD,
    SCHEDULER_NAME,
    SECRET,
    SERVICE,
    ResourceKind,
    truncate_name,
)
from scheduler.kubernetes.job_secrets import build_secret_mounts, build_secret_variables, build_secret_volumes
from scheduler.kubernetes.node_view import GPU_TOLERATION, Toleration
from scheduler.kubernetes.pod_changes import PodToCreate
from scheduler.kubernetes.prefetch_pods import pin_to_node

Manifest = dict[str, Any]

DEFAULT_GRACE_PERIOD_S = 60
"""Default grace period of agent pods: the time that ranks have to save when a pod is deleted. Templates can override
it.
"""
_CONTAINER_NAME = "worker"


@dataclass(frozen=True, slots=True)
class ManifestContext:
    """Values shared by all objects of a job.

    `owner_uid` is the uid of its ElasticJob, empty without one. `url` is the API URL for agents, `image` the default
    image, `agent` the image with the node agent, `pull_secrets` are Secrets for them. `tolerations` are keyed by node.
    """

    namespace: str
    epoch: int
    url: str
    image: str
    agent: AgentImage
    pull_secrets: tuple[str, ...] = ()
    resource_name: str = ""
    owner_uid: str = ""
    tolerations: Mapping[str, Sequence[Toleration]] = field(default_factory=dict)


def job_object_name(job_id: str) -> str:
    """Return the name of a job's service, plan and token, shortened to a DNS label."""
    return truncate_name(f"ebbtide-{job_id}", LABEL_MAX_LENGTH)


def build_agent_pod(job: Job, new_pod: PodToCreate, context: ManifestContext) -> Manifest:
    """Return the unbound agent pod of the job on one node."""
    template = json.loads(job.spec.pod_template_json or '{"spec": {"containers": [{}]}}')
    spec = template["spec"]
    mounts_shm = _has_shm_mount(spec["containers"][0])
    template_grace_s = spec.get("terminationGracePeriodSeconds")
    spec["terminationGracePeriodSeconds"] = grace_s = (
        DEFAULT_GRACE_PERIOD_S if template_grace_s is None else template_grace_s
    )
    spec["containers"][0] = _build_agent_container(spec["containers"][0], job, new_pod, context, grace_s)
    spec["volumes"] = [*spec.get("volumes", ()), *_build_volumes(job, needs_shm=not mounts_shm)]
    spec["volumes"].append(build_agent_volume(context.agent))
    spec["initContainers"] = build_init_containers(context.agent, spec)
    spec["tolerations"] = [*spec.get("tolerations", ()), *_build_tolerations(context.tolerations.get(new_pod.node, ()))]
    spec["affinity"] = pin_to_node(spec.get("affinity") or {}, new_pod.node)
    if pull_secrets := _merge_pull_secrets(spec.get("imagePullSecrets") or (), context.pull_secrets):
        spec["imagePullSecrets"] = pull_secrets
    spec["schedulerName"], spec["restartPolicy"] = SCHEDULER_NAME, "Never"
    spec["hostname"], spec["subdomain"] = new_pod.name, job_object_name(job.id)
    # Service links would add variables of every Service in the namespace, such as EBBTIDE_PORT for a Service named
    # ebbtide.
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("automountServiceAccountToken", False)
    meta = template.get("metadata") or {}
    metadata = {
        "name": new_pod.name,
        "labels": {
            **(meta.get("labels") or {}),
            **_job_labels(job.id),
            NODE_LABEL: truncate_name(new_pod.node, LABEL_MAX_LENGTH),
            GENERATION_LABEL: str(job.allocation.generation),
        },
        "annotations": {
            **(meta.get("annotations") or {}),
            NODE_LABEL: new_pod.node,
            GPUS_ANNOTATION: str(new_pod.gpus),
        },
    }
    return _build_manifest(POD, context, metadata, spec=spec)


def build_service(job: Job, context: ManifestContext) -> Manifest:
    """Return the headless service.

    It includes pods that are not ready, because ranks resolve each other's pod names early.
    """
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: job.id}}
    return _build_manifest(SERVICE, context, _job_metadata(job.id), spec=spec)


def build_plan_config_map(job: Job, context: ManifestContext) -> Manifest:
    """Return the ConfigMap with the plan, for people and for scripts other than Ebbtide's trainer."""
    assert job.allocation.plan is not None, "a job with a target has a plan"
    data = {"plan.json": json.dumps(plan_to_json(job.allocation.plan), sort_keys=True)}
    metadata = _job_metadata(job.id)
    metadata["labels"][GENERATION_LABEL] = str(job.allocation.generation)
    return _build_manifest(CONFIG_MAP, context, metadata, data=data)


def build_token_secret(job: Job, context: ManifestContext, token: str) -> Manifest:
    """Return the Secret with the agents' API token, valid for this job only."""
    data = {"token": base64.b64encode(token.encode()).decode()}
    return _build_manifest(SECRET, context, _job_metadata(job.id), type="Opaque", data=data)


def _build_manifest(kind: ResourceKind, context: ManifestContext, meta: Mapping[str, Any], **body: Any) -> Manifest:
    annotations = {**meta.get("annotations", {}), EPOCH_ANNOTATION: str(context.epoch)}
    metadata: Manifest = {**meta, "namespace": context.namespace, "annotations": annotations}
    if context.owner_uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": ELASTIC_JOB.api_version,
                "kind": ELASTIC_JOB.name,
                "name": context.resource_name,
                "uid": context.owner_uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **body}


def _job_metadata(job_id: str) -> Manifest:
    return {"name": job_object_name(job_id), "labels": _job_labels(job_id)}


def _job_labels(job_id: str) -> dict[str, str]:
    return {JOB_LABEL: job_id, MANAGED_BY_LABEL: SCHEDULER_NAME}


def _build_agent_container(
    container: Mapping[str, Any], job: Job, new_pod: PodToCreate, context: ManifestContext, grace_period_s: int
) -> Manifest:
    """Return the template's first container with the agent as its command. The agent starts the job's own command."""
    agent = {"name": _CONTAINER_NAME, **container}
    agent["image"] = job.spec.image or agent.get("image") or context.image
    agent["command"], agent["args"] = list(AGENT_COMMAND), []
    metadata = {
        "EBBTIDE_JOB_ID": job.id,
        "EBBTIDE_NODE": new_pod.node,
        "EBBTIDE_URL": context.url,
        "EBBTIDE_TOKEN_FILE": f"{TOKEN_DIR}/token",
        "EBBTIDE_RUN_ROOT": RUN_ROOT,
        "EBBTIDE_CHECKPOINT_DIR": _find_checkpoint_dir(agent, job),
        "EBBTIDE_GRACE_S": str(grace_period_s),
    }
    env = {**dict(job.spec.env), **metadata}
    overridden = env.keys() | {each.env for each in job.spec.program.secrets}
    template_env = [each for each in agent.get("env", ()) if each.get("name") not in overridden]
    if "TMPDIR" not in env and all(each.get("name") != "TMPDIR" for each in template_env):
        env["TMPDIR"] = RUN_ROOT  # torch fails to import without one, and the root file system is read-only
    agent["env"] = [
        *template_env,
        *({"name": name, "value": value} for name, value in env.items()),
        *build_secret_variables(job),
        _pod_uid_variable(),
    ]
    agent["volumeMounts"] = [*agent.get("volumeMounts", ()), *_build_volume_mounts(agent, job)]
    resources = copy.deepcopy(agent.get("resources") or {})
    for kind in ("requests", "limits"):
        amounts = resources.get(kind) or {}
        if job.spec.resources_per == PER_GPU:
            amounts = {name: multiply_quantity(name, amount, new_pod.gpus) for name, amount in amounts.items()}
        resources[kind] = {**amounts, GPU_RESOURCE: str(new_pod.gpus)}
    agent["resources"] = resources
    return agent


def _find_checkpoint_dir(container: Mapping[str, Any], job: Job) -> str:
    """Return the checkpoint directory. Without a volume it is empty: the agent chooses a folder of the pod."""
    mounts = {posixpath.normpath(str(mount.get("mountPath"))) for mount in container.get("volumeMounts", ())}
    has_volume = job.spec.checkpoint.volume is not None or CHECKPOINT_DIR in mounts
    return job.spec.checkpoint.dir or (CHECKPOINT_DIR if has_volume else "")


def _pod_uid_variable() -> Manifest:
    return {"name": "EBBTIDE_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}


def _build_volume_mounts(container: Mapping[str, Any], job: Job) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "ebbtide-run", "mountPath": RUN_ROOT},
        {"name": "ebbtide-token", "mountPath": TOKEN_DIR, "readOnly": True},
        {"name": "ebbtide-plan", "mountPath": PLAN_DIR, "readOnly": True},
        build_agent_mount(),
        *build_secret_mounts(job),
    ]
    if job.spec.checkpoint.volume is not None:
        folder = job.spec.checkpoint.volume.sub_path or job.id
        mount_path = job.spec.checkpoint.dir or CHECKPOINT_DIR
        mounts.append({"name": "ebbtide-checkpoints", "mountPath": mount_path, "subPath": folder})
    return mounts if _has_shm_mount(container) else [*mounts, {"name": "ebbtide-shm", "mountPath": SHM_DIR}]


def _has_shm_mount(container: Mapping[str, Any]) -> bool:
    return any(mount.get("mountPath") == SHM_DIR for mount in container.get("volumeMounts", ()))


def _build_volumes(job: Job, *, needs_shm: bool) -> list[Manifest]:
    """Return the volumes.

    `needs_shm`: NCCL and data loaders use shared memory, and containers get only 64 MiB by default.
    """
    name = job_object_name(job.id)
    volumes: list[Manifest] = [
        {"name": "ebbtide-run", "emptyDir": {}},
        # World-readable, because the template can run the pod as any user.
        {"name": "ebbtide-token", "secret": {"secretName": name, "defaultMode": 0o444}},
        {"name": "ebbtide-plan", "configMap": {"name": name, "optional": True}},
        *build_secret_volumes(job),
    ]
    if job.spec.checkpoint.volume is not None:
        claim = {"claimName": job.spec.checkpoint.volume.claim}
        volumes.append({"name": "ebbtide-checkpoints", "persistentVolumeClaim": claim})
    return [*volumes, {"name": "ebbtide-shm", "emptyDir": {"medium": "Memory"}}] if needs_shm else volumes


def _build_tolerations(pool_tolerations: Sequence[Toleration]) -> list[Manifest]:
    """Return the tolerations. Kubelet evicts pods that do not tolerate NoExecute taints."""
    return [
        {**LOANED_TAINT, "operator": "Equal"},
        *(each.to_manifest() for each in (GPU_TOLERATION, *pool_tolerations)),
    ]


def _merge_pull_secrets(own: Sequence[Manifest], defaults: Sequence[str]) -> list[Manifest]:
    """Return the references of the template, then the other ones. Kubernetes forbids duplicates."""
    names = {each.get("name") for each in own}
    return [*own, *({"name": name} for name in defaults if name not in names)]
