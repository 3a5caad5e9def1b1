"""Resource kinds, labels and annotations that Ebbtide uses, and accessors for API objects.

API objects are JSON dicts and are never modified in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from sys import intern
from typing import Any

GROUP = "ebbtide.dev"
VERSION = "v1alpha1"


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """A resource kind. `group` is empty for the core group."""

    group: str
    version: str
    name: str
    plural: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


ELASTIC_JOB = ResourceKind(GROUP, VERSION, "ElasticJob", "elasticjobs")
POOL = ResourceKind(GROUP, VERSION, "Pool", "pools", is_namespaced=False)
LOAN = ResourceKind(GROUP, VERSION, "Loan", "loans", is_namespaced=False)
QUEUE = ResourceKind(GROUP, VERSION, "Queue", "queues", is_namespaced=False)
GPU_PROFILE = ResourceKind(GROUP, VERSION, "GpuProfile", "gpuprofiles", is_namespaced=False)

NODE = ResourceKind("", "v1", "Node", "nodes", is_namespaced=False)
POD = ResourceKind("", "v1", "Pod", "pods")
SERVICE = ResourceKind("", "v1", "Service", "services")
CONFIG_MAP = ResourceKind("", "v1", "ConfigMap", "configmaps")
SECRET = ResourceKind("", "v1", "Secret", "secrets")
VOLUME_CLAIM = ResourceKind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
PERSISTENT_VOLUME = ResourceKind("", "v1", "PersistentVolume", "persistentvolumes", is_namespaced=False)
EVENT = ResourceKind("events.k8s.io", "v1", "Event", "events")
LEASE = ResourceKind("coordination.k8s.io", "v1", "Lease", "leases")
POD_TEMPLATE = ResourceKind("", "v1", "PodTemplate", "podtemplates")
DEPLOYMENT = ResourceKind("apps", "v1", "Deployment", "deployments")
AUTOSCALER = ResourceKind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = ResourceKind("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")
"""An autoscaler of KEDA (keda.sh), which is not installed everywhere."""

FIELD_MANAGER = "ebbtide"
SCHEDULER_NAME = "ebbtide"
MANAGED_BY = f"{GROUP}/operator"
"""The value of an ElasticJob's `managedBy` that selects Ebbtide. An empty value does too."""
JOB_FINALIZER = f"{GROUP}/job"
POOL_FINALIZER = f"{GROUP}/pool"
QUEUE_FINALIZER = f"{GROUP}/queue"
GPU_PROFILE_FINALIZER = f"{GROUP}/gpu-profile"

GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""GPU model of a node and memory of a GPU in MiB, set by NVIDIA's GPU feature discovery."""
GPU_LABEL = f"{GROUP}/gpu"
"""GPU model of a node as a profile name. Overrides the product label."""
LENDABLE_LABEL = f"{GROUP}/lendable"
"""On a node: with the value "false", the node is not lent."""
LENDABLE_GPUS_LABEL = f"{GROUP}/lendable-gpus"
"""On a node: how many of its GPUs a loan takes while inference serves from the others."""

SERVING_LABEL = f"{GROUP}/serving"
"""On a warm standby replica: "true" while it gets requests, else "false". Its Services select "true"."""
PREFETCH_LABEL = f"{GROUP}/prefetch"
"""On a pod that loads images or weights onto its node: the purpose."""

JOB_LABEL = f"{GROUP}/job"
NODE_LABEL = f"{GROUP}/node"
LOAN_LABEL = f"{GROUP}/loan"
GENERATION_LABEL = f"{GROUP}/generation"
"""On a pod: the job generation in which it was created. On a plan: the generation of the plan."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY_EBBTIDE = "ebbtide"

EPOCH_ANNOTATION = f"{GROUP}/epoch"
GPUS_ANNOTATION = f"{GROUP}/gpus"
ORIGIN_ANNOTATION = f"{GROUP}/origin"
"""Marks an ElasticJob that Ebbtide created for a job submitted over HTTP. Its name is the job id."""
ORIGIN_API = "api"
LABELS_ANNOTATION = f"{GROUP}/job-labels"
"""On an ElasticJob: the labels that it and its job had in common at last, as JSON. What differs was changed since."""

LOANED_TAINT_KEY = f"{GROUP}/loaned"
LOANED_TAINT = {"key": LOANED_TAINT_KEY, "value": "training", "effect": "NoSchedule"}


LABEL_MAX_LENGTH = 63
"""Maximum length of a DNS label: Service names, host names and label values."""
_DIGITS_MAX = 18

Object = dict[str, Any]
ObjectKey = tuple[str, str]
"""(namespace, name). The namespace of cluster-scoped objects is empty."""


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def namespace_of(item: Object) -> str:
    return str(item["metadata"].get("namespace", ""))


def key_of(item: Object) -> ObjectKey:
    return namespace_of(item), name_of(item)


def uid_of(item: Object) -> str:
    return str(item["metadata"]["uid"])


def version_of(item: Object) -> int:
    """Return the resourceVersion as a number. Versions of one resource grow with each write (KEP-5504)."""
    return int(item["metadata"]["resourceVersion"])


def labels_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def annotations_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}


def is_terminating(item: Object) -> bool:
    return "deletionTimestamp" in item["metadata"]


def parse_count(text: object, *, default: int = 0) -> int:
    """Return the non-negative integer in `text`, or `default`.

    The length is limited because anyone can write labels and int() raises for thousands of digits.
    """
    digits = str(text)
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX else default


def truncate_name(name: str, max_length: int) -> str:
    """Return `name`, shortened to `max_length` characters with a digest of the full name if it is longer."""
    if len(name) <= max_length:
        return name
    digest = sha256(name.encode()).hexdigest()[:8]
    return f"{name[: max_length - 9].rstrip('-')}-{digest}"


def strip_managed_fields(item: Object) -> Object:
    """Return a copy without managedFields, which take a third of a pod, and with interned keys.

    Interned keys are shared between objects. Otherwise every parsed document holds its own copies.
    """
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    stripped: Object = _intern_keys({**item, "metadata": metadata})
    return stripped


def _intern_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {intern(key): _intern_keys(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_intern_keys(each) for each in value]
    return value
