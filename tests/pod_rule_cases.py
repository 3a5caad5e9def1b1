"""Specs of pods that the API server rejects or accepts, for the checks of pod templates and the server itself."""

from __future__ import annotations

from typing import Any

VOLUMES = [{"name": "data", "emptyDir": {}}]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PORT = {"containerPort": 80, "hostPort": 80}


def affinity(operator: str, *values: str, key: str = "zone") -> dict[str, Any]:
    requirement = {"key": key, "operator": operator, "values": list(values)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}
    return {"affinity": {"nodeAffinity": {REQUIRED: terms}}}


def fabric(**amounts: str) -> dict[str, Any]:
    return {"containers": [{"resources": {kind: {"rdma/hca": amount} for kind, amount in amounts.items()}}]}


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"containers": [{"name": "a"}, {"name": "a", "image": "x"}]}, r"containers\[1\].name: got \"a\".*unique"),
    ({"containers": [{}, {"image": "x"}]}, r"containers\[1\].name: got nothing"),
    ({"containers": [{"name": "A"}]}, r"containers\[0\].name: got \"A\""),
    ({"containers": [{}, {"name": "b"}]}, r"containers\[1\].image: got nothing"),
    ({"containers": [{"name": "a"}], "initContainers": [{"name": "a", "image": "x"}]}, r"containers\[0\].name"),
    ({"containers": [{"imagePullPolicy": "Allways"}]}, r"containers\[0\].imagePullPolicy.*did you mean 'Always'"),
    (
        {"containers": [{"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}}]},
        r"containers\[0\].resources.requests\[cpu\]: got \"1500m\"; allowed: at most 1, its limit",
    ),
    ({"containers": [{}], "volumes": [*VOLUMES, *VOLUMES]}, r"volumes\[1\].name: got \"data\".*unique"),
    ({"containers": [{}], "volumes": [{**VOLUMES[0], "hostPath": {"path": "/"}}]}, r"volumes\[0\]: got"),
    (
        {"containers": [{"volumeMounts": [{"name": "dat", "mountPath": "/a"}]}], "volumes": VOLUMES},
        r"containers\[0\].volumeMounts\[0\].name: got \"dat\".*did you mean 'data'",
    ),
    (
        {"containers": [{"volumeMounts": [{"name": "data"}]}], "volumes": VOLUMES},
        r"containers\[0\].volumeMounts\[0\].mountPath: got nothing",
    ),
    ({"containers": [{"ports": [{"containerPort": 0}]}]}, r"containers\[0\].ports\[0\].containerPort: got 0"),
    ({"containers": [{"ports": [{**PORT, "protocol": "HTTP"}]}]}, r"containers\[0\].ports\[0\].protocol"),
    ({"containers": [{"ports": [PORT, PORT]}]}, r"containers\[0\].ports\[1\].hostPort: got 80.*unique"),
    (
        {"containers": [{"ports": [{**PORT, "hostPort": 81}]}], "hostNetwork": True},
        r"containers\[0\].ports\[0\].hostPort: got 81; allowed: 80",
    ),
    ({"containers": [{}], "nodeSelector": {"zone": "a b"}}, r"nodeSelector\[zone\]: got \"a b\""),
    ({"containers": [{}], "nodeSelector": {"a b": "c"}}, r"nodeSelector\[a b\]: got \"a b\""),
    ({"containers": [{}], "nodeSelector": {"Team/zone": "c"}}, r"nodeSelector\[Team/zone\]"),
    (fabric(requests="1"), r"containers\[0\].resources.limits\[rdma/hca\]: got nothing; allowed: 1"),
    (fabric(limits="500m"), r"containers\[0\].resources.limits\[rdma/hca\]: got \"500m\""),
    (fabric(requests="1", limits="2"), r"containers\[0\].resources.requests\[rdma/hca\]: got \"1\""),
    (
        {"containers": [{}], "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}},
        r".*nodeSelectorTerms: got nothing",
    ),
    ({"containers": [{}], "dnsPolicy": "Cluster"}, "dnsPolicy"),
    ({"containers": [{}], "tolerations": [{"operator": "Exists", "value": "b"}]}, r"tolerations\[0\].value"),
    ({"containers": [{}], "tolerations": [{"value": "b"}]}, r"tolerations\[0\].key: got nothing"),
    ({"containers": [{}], "tolerations": [{"key": "a", "effect": "No"}]}, r"tolerations\[0\].effect"),
    ({"containers": [{}], **affinity("Equals", "a")}, r".*matchExpressions\[0\].operator: got \"Equals\""),
    ({"containers": [{}], **affinity("In")}, r".*matchExpressions\[0\].values: got nothing"),
    ({"containers": [{}], **affinity("Exists", "a")}, r".*matchExpressions\[0\].values: got \"a\""),
    ({"containers": [{}], **affinity("In", "a", key="")}, r".*matchExpressions\[0\].key"),
]
"""Specs, each with the path of the wrong field and what follows it in the message, as a regular expression."""

ACCEPTED: list[dict[str, Any]] = [
    {"containers": [{}], "volumes": [{"name": "data", "emptyDir": None}]},
    {"containers": [{"ports": [PORT, {**PORT, "protocol": "UDP"}, {**PORT, "hostIP": "10.0.0.1"}]}]},
    {"containers": [{"ports": [{**PORT, "hostPort": 0}]}]},
    {
        "containers": [{"ports": [PORT]}],
        "initContainers": [{"name": "first", "image": "x", "ports": [PORT]}],
        "hostNetwork": True,
    },
    {"containers": [{}], **affinity("Exists")},
    {"containers": [{}], "nodeSelector": {"example.com/team_a.b": "vision"}},
    fabric(limits="1"),
    fabric(requests="1", limits="1"),
    {"containers": [{}], "volumes": [{"name": "a", "emptyDir": {"medium": "HugePages-2Mi", "sizeLimit": "10Gi"}}]},
    {"containers": [{}], "tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": ""}},
]
