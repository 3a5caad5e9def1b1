"""The kinds of objects that Ebbtide reads and writes, and every name that it gives to what it writes."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "ebbtide.dev"
VERSION = "v1alpha1"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object at the API server. `group` is empty for the core group."""

    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


ELASTIC_JOB = Kind(GROUP, VERSION, "ElasticJob", "elasticjobs")
POOL = Kind(GROUP, VERSION, "Pool", "pools", namespaced=False)
LOAN = Kind(GROUP, VERSION, "Loan", "loans", namespaced=False)
QUEUE = Kind(GROUP, VERSION, "Queue", "queues", namespaced=False)

NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
POD = Kind("", "v1", "Pod", "pods")
SERVICE = Kind("", "v1", "Service", "services")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SECRET = Kind("", "v1", "Secret", "secrets")
CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENT = Kind("events.k8s.io", "v1", "Event", "events")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")

FIELD_MANAGER = "ebbtide"
SCHEDULER_NAME = "ebbtide"
MANAGED_BY = f"{GROUP}/operator"
"""The value of an ElasticJob's `managedBy` that means us; an empty one does too."""
JOB_FINALIZER = f"{GROUP}/job"
POOL_FINALIZER = f"{GROUP}/pool"
QUEUE_FINALIZER = f"{GROUP}/queue"

GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
"""What NVIDIA's feature discovery calls the GPU model of a node."""
GPU_LABEL = f"{GROUP}/gpu"
"""Ebbtide's name of a node's GPU model, where the pool does not say it and the product's name is not known."""

JOB_LABEL = f"{GROUP}/job"
NODE_LABEL = f"{GROUP}/node"
LOAN_LABEL = f"{GROUP}/loan"
GENERATION_LABEL = f"{GROUP}/generation"
"""Of a job: of pods that in which they were made, of a plan that which it is of."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"

EPOCH_ANNOTATION = f"{GROUP}/epoch"
GPUS_ANNOTATION = f"{GROUP}/gpus"
ORIGIN_ANNOTATION = f"{GROUP}/origin"
"""Of an ElasticJob that we made for a job which somebody else asked for: its name is the job's id."""
FROM_API = "api"

LOANED_TAINT_KEY = f"{GROUP}/loaned"
LOANED_TAINT = {"key": LOANED_TAINT_KEY, "value": "training", "effect": "NoSchedule"}
