"""Manifests with one mistake each, as people make them, and how Ebbtide answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.kubernetes.api_objects import ELASTIC_JOB, POOL, QUEUE, ResourceKind

SERVING = {"kind": "inference", "nodeSelector": {"ebbtide.dev/test-pool": "absent"}, "gpu": "h100-80g"}
TRAINING = {"kind": "training", "nodeSelector": {"ebbtide.dev/test-pool": "absent"}, "gpu": "h100-80g"}
SERVED = {"model": "llama-3-8b", "gpu": "rtx-4090", "objective": {"ttft": "1s", "tpot": "50ms"}}
RANGE = {"min": 2, "max": 8}
REFUSED = "Refused"


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong manifest and the words that its rejection contains: the field, mostly the value, and a hint.

    Args:
        reason: the reason of the condition that reports it, empty if the API server refuses the manifest.
        top: fields outside `spec` that replace the usual ones.
    """

    kind: ResourceKind
    spec: Mapping[str, Any]
    words: tuple[str, ...]
    reason: str = ""
    top: Mapping[str, Any] = field(default_factory=dict)


def job(change: Mapping[str, Any], *words: str, reason: str = "", **top: Any) -> Case:
    """Return a job that differs from a valid one in `change`. A value of None removes the field."""
    spec = {"gpus": RANGE, "command": ["python", "train.py"], "steps": 1000, **change}
    return Case(ELASTIC_JOB, {name: value for name, value in spec.items() if value is not None}, words, reason, top)


def template(change: Mapping[str, Any], *words: str, reason: str = REFUSED, container: Any = None) -> Case:
    """Return a job whose pod template has `change` in its spec, and `container` in its first container."""
    first = {"name": "main", "image": "trainer:1", **(container or {})}
    return job({"template": {"spec": {"containers": [first], **change}}}, *words, reason=reason)


def container(change: Mapping[str, Any], *words: str, reason: str = REFUSED) -> Case:
    return template({}, *words, reason=reason, container=change)


def pool(base: Mapping[str, Any], change: Mapping[str, Any], *words: str, reason: str = "") -> Case:
    spec = {**base, **change}
    return Case(POOL, {name: value for name, value in spec.items() if value is not None}, words, reason)


def queue(spec: Mapping[str, Any], *words: str, **top: Any) -> Case:
    return Case(QUEUE, spec, words, top=top)


def _claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


def _resources(**amounts: Any) -> dict[str, Any]:
    return {"resources": amounts}


def _node_affinity(requirement: Mapping[str, Any]) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


_TWO_MAINS = [{"name": "main", "image": "a"}, {"name": "main", "image": "b"}]
_MODEL = {"model": "gpt2", "globalBatch": 8}

JOBS: Mapping[str, Case] = {
    "misspelled field": job({"gpuss": 1}, 'unknown field "spec.gpuss"'),
    "misspelled nested field": job({"checkpoint": {"intervall": "5m"}}, 'unknown field "spec.checkpoint.intervall"'),
    "other API version": job({}, "ebbtide.dev/v1", apiVersion="ebbtide.dev/v1"),
    "name too long": job({}, "metadata.name", "52", metadata={"name": "a" * 53}),
    "name with a dot": job({}, "metadata.name", "a.b", metadata={"name": "a.b"}),
    "no gpus": job({"gpus": None}, "spec.gpus: Required"),
    "no max": job({"gpus": {"min": 1}}, "spec.gpus.max: Required"),
    "zero GPUs": job({"gpus": {"min": 0, "max": 8}}, "spec.gpus.min", "0", "greater than or equal to 1"),
    "negative GPUs": job({"gpus": {"min": -2, "max": 8}}, "spec.gpus.min", "-2", "greater than or equal to 1"),
    "min above max": job({"gpus": {"min": 8, "max": 4}}, "spec.gpus.min", "less than or equal to gpus.max"),
    "GPUs as text": job({"gpus": {"min": "two", "max": 8}}, "spec.gpus.min", "integer"),
    "unknown mix": job({"gpus": {**RANGE, "mix": "sometimes"}}, "spec.gpus.mix", "sometimes", "allow"),
    "unknown GPU model": job({"gpu": "h100-80gb"}, 'gpu: got "h100-80gb"', "h100-80g", reason=REFUSED),
    "unknown model": job({**_MODEL, "model": "gpt-2"}, 'model: got "gpt-2"', "gpt2", reason=REFUSED),
    "model without a batch": job({"model": "gpt2"}, "spec.globalBatch"),
    "model and profile": job({**_MODEL, "profile": {"name": "x"}}, "spec.profile", "remove one"),
    "empty profile": job({"profile": {}, "globalBatch": 8}, "profile", "layers", reason=REFUSED),
    "undeclared queue": job({"queue": "reserch"}, 'queue: got "reserch"', "research", reason="QueueNotFound"),
    "queue with capitals": job({"queue": "Research"}, "spec.queue", "Research"),
    "priority too high": job({"priority": 5000}, "spec.priority", "5000", "1000"),
    "steps as text": job({"steps": "1000"}, "spec.steps", "integer"),
    "no steps": job({"steps": 0}, "spec.steps", "0"),
    "deadline in words": job({"deadline": "tomorrow"}, "spec.deadline", "tomorrow"),
    "negative duration": job({"hangTimeout": "-5s"}, "spec.hangTimeout", "-5s"),
    "zero run time": job({"maxRunTime": "0s"}, 'maxRunTime: got "0s"', "above 0", reason=REFUSED),
    "negative retries": job({"retries": -1}, "spec.retries", "-1"),
    "suspend as text": job({"suspend": "yes"}, "spec.suspend", "boolean"),
    "unknown launch": job({"launch": "pod"}, "spec.launch", "pod", "node"),
    "unknown onResize": job({"onResize": "maybe"}, "spec.onResize", "maybe", "restart"),
    "speed of an unknown GPU": job({"speeds": {"h10": 1}}, 'speeds: got "h10"', "h100-80g", reason=REFUSED),
    "speed of zero": job({"speeds": {"t4": 0}}, "spec.speeds.t4", "0"),
    "lengths without a model": job({"lengths": {"512": 1}}, "spec.lengths", "model"),
    "malformed archive": job({"workdir": {"archive": "latest"}}, "spec.workdir.archive", "latest"),
    "setup without workdir": job({"setup": ["make"]}, "spec.setup", "workdir"),
    "reserved variable": job({"env": {"RANK": "0"}}, "spec.env", "RANK"),
    "variable with a dash": job({"env": {"MY-NAME": "0"}}, "spec.env"),
    "no command": job({"command": None}, "spec.command", "template"),
    "keep nothing": job({"checkpoint": {"keep": 0}}, "spec.checkpoint.keep", "0"),
    "interval in words": job({"checkpoint": {"interval": "15 minutes"}}, "spec.checkpoint.interval", "15 minutes"),
    "relative mount path": job({"checkpoint": {"dir": "saved", "volume": _claim("a")}}, "spec.checkpoint.dir"),
    "volume without a claim": job({"checkpoint": {"volume": {}}}, "spec.checkpoint.volume.persistentVolumeClaim"),
    "path out of the volume": job(
        {"checkpoint": {"volume": {**_claim("a"), "subPath": "../b"}}}, "spec.checkpoint.volume.subPath"
    ),
    "missing claim for checkpoints": job(
        {"checkpoint": {"volume": _claim("nowhere")}}, "checkpoint.volume", "nowhere", reason="ClaimNotFound"
    ),
    "bucket without a name": job({"checkpoint": {"dir": "s3:///runs"}}, "spec.checkpoint.dir", "s3://BUCKET"),
    "bucket with credentials": job(
        {"checkpoint": {"dir": "s3://key:secret@runs/a"}}, "spec.checkpoint.dir", "credentials"
    ),
    "unknown kind of bucket": job({"checkpoint": {"dir": "s4://runs/a"}}, "spec.checkpoint.dir", "s3://BUCKET"),
    "more GPUs than there are": job({"gpus": {"min": 96, "max": 96}}, "96", "16", reason="NoMatchingFlavor"),
}

TEMPLATES: Mapping[str, Case] = {
    "no containers": job({"template": {"spec": {}}}, "spec.template.spec.containers: Required"),
    "empty containers": job({"template": {"spec": {"containers": []}}}, "spec.template.spec.containers"),
    "no template spec": job({"template": {"metadata": {}}}, "spec.template.spec: Required"),
    "misspelled container field": container(
        {"imagePulPolicy": "Always"}, "template.spec.containers[0].imagePulPolicy", "Always", "imagePullPolicy"
    ),
    "misspelled pod field": template({"nodeSelecter": {"a": "b"}}, "template.spec.nodeSelecter", "nodeSelector"),
    "unknown pull policy": container(
        {"imagePullPolicy": "Sometimes"}, "template.spec.containers[0].imagePullPolicy", "Sometimes", "IfNotPresent"
    ),
    "letter O for a zero": container(
        _resources(limits={"cpu": "1O"}), "template.spec.containers[0].resources.limits[cpu]", "1O", "500m"
    ),
    "negative memory": container(
        _resources(requests={"memory": "-1Gi"}), "template.spec.containers[0].resources.requests[memory]", "-1Gi"
    ),
    "limits below requests": container(
        _resources(requests={"cpu": "8"}, limits={"cpu": "4"}),
        "template.spec.containers[0].resources.requests[cpu]",
        '"8"',
        "at most 4",
    ),
    "GPUs in the template": job(
        {"template": {"spec": {"containers": [_resources(limits={"nvidia.com/gpu": 8})]}}},
        "spec.template.spec.containers[0].resources.limits",
        "gpus.min",
    ),
    "more CPUs than any node": container(
        _resources(requests={"cpu": "960"}), "960 CPUs", "64 CPUs", reason="NoFeasibleNode"
    ),
    "two containers of one name": template(
        {"containers": _TWO_MAINS}, "template.spec.containers[1].name", "main", "unique"
    ),
    "container name with capitals": container({"name": "Main"}, "template.spec.containers[0].name", "Main", "a-z"),
    "second container without an image": template(
        {"containers": [{"name": "main"}, {"name": "logs"}]}, "template.spec.containers[1].image", "nothing"
    ),
    "two volumes of one name": template(
        {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]},
        "template.spec.volumes[1].name",
        "unique",
    ),
    "volume with two sources": template(
        {"volumes": [{"name": "a", "emptyDir": {}, **_claim("b")}]}, "template.spec.volumes[0]", "persistentVolumeClaim"
    ),
    "mount of no volume": container(
        {"volumeMounts": [{"name": "dta", "mountPath": "/data"}]},
        "template.spec.containers[0].volumeMounts[0].name",
        "dta",
    ),
    "two mounts at one path": template(
        {"volumes": [{"name": "a", "emptyDir": {}}]},
        "template.spec.containers[0].volumeMounts[1].mountPath",
        "/a",
        container={"volumeMounts": [{"name": "a", "mountPath": "/a"}, {"name": "a", "mountPath": "/a"}]},
    ),
    "reserved volume name": template(
        {"volumes": [{"name": "ebbtide-run", "emptyDir": {}}]}, "template.spec.volumes", "ebbtide-run"
    ),
    "missing claim in the template": template(
        {"volumes": [{"name": "a", **_claim("absent")}]}, "absent", "template", reason="ClaimNotFound"
    ),
    "rank variable": container(
        {"env": [{"name": "WORLD_SIZE", "value": "8"}]}, "template.spec.containers[0].env[0].name", "WORLD_SIZE"
    ),
    "port out of range": container(
        {"ports": [{"containerPort": 70000}]}, "template.spec.containers[0].ports[0].containerPort", "70000", "65535"
    ),
    "host ports that clash": template(
        {
            "containers": [
                {"name": "main", "ports": [{"containerPort": 80, "hostPort": 80}]},
                {"name": "side", "image": "b", "ports": [{"containerPort": 80, "hostPort": 80}]},
            ]
        },
        "template.spec.containers[1].ports[0].hostPort",
        "80",
    ),
    "host network with another port": template(
        {"hostNetwork": True},
        "template.spec.containers[0].ports[0].hostPort",
        "81",
        "80",
        container={"ports": [{"containerPort": 80, "hostPort": 81}]},
    ),
    "scheduler of the user": template({"schedulerName": "volcano"}, "template.spec.schedulerName", "volcano"),
    "label with a blank": template(
        {"nodeSelector": {"zone": "east 1"}}, "template.spec.nodeSelector[zone]", "east 1", "63"
    ),
    "node selector of no node": template(
        {"nodeSelector": {"zone": "mars"}}, "nodeSelector", "zone=mars", reason="NoFeasibleNode"
    ),
    "unknown affinity operator": template(
        _node_affinity({"key": "zone", "operator": "Equals", "values": ["a"]}), "operator", "Equals", "NotIn"
    ),
    "affinity without values": template(_node_affinity({"key": "zone", "operator": "In"}), "values", "In"),
    "toleration with Exists and a value": template(
        {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        "template.spec.tolerations[0].value",
        "Exists",
    ),
    "negative grace period": template(
        {"terminationGracePeriodSeconds": -1}, "template.spec.terminationGracePeriodSeconds", "-1"
    ),
}

REJECTED = "TemplateRejected"


def _volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "a", **source}]}


def _required_terms(terms: list[Any]) -> dict[str, Any]:
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }


_FIRST = "template.spec.containers[0]"
_OTHER_FIELD = {"matchFields": [{"key": "metadata.label", "operator": "In", "values": ["x"]}]}

SERVER_RULES: Mapping[str, Case] = {
    "extended resource without a limit": container(
        _resources(requests={"rdma/hca": "1"}), f"{_FIRST}.resources.limits[rdma/hca]", "limit"
    ),
    "part of an extended resource": container(
        _resources(requests={"rdma/hca": "0.5"}, limits={"rdma/hca": "0.5"}), f"{_FIRST}.resources", "0.5"
    ),
    "extended resource above its request": container(
        _resources(requests={"rdma/hca": "1"}, limits={"rdma/hca": "2"}), f"{_FIRST}.resources.requests[rdma/hca]", "1"
    ),
    "resource without a domain": container(
        _resources(requests={"mem": "1Gi"}), f"{_FIRST}.resources.requests", "mem", reason=REJECTED
    ),
    "equals sign in a variable": container(
        {"env": [{"name": "A=B", "value": "1"}]}, f"{_FIRST}.env[0].name", "A=B", reason=REJECTED
    ),
    "value and its source": container(
        {"env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "x", "key": "k"}}}]},
        f"{_FIRST}.env[0].valueFrom",
        "may not be specified when `value` is not empty",
        reason=REJECTED,
    ),
    "secret without a key": container(
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "x"}}}]},
        f"{_FIRST}.env[0].valueFrom.secretKeyRef.key",
        "Required",
        reason=REJECTED,
    ),
    "claim without a name": template(
        _volume(persistentVolumeClaim={}), "volumes[0].persistentVolumeClaim.claimName", reason=REJECTED
    ),
    "host path without a path": template(_volume(hostPath={}), "volumes[0].hostPath.path", reason=REJECTED),
    "size with a blank": template(_volume(emptyDir={"sizeLimit": "10 GB"}), "volumes[0].emptyDir.sizeLimit", "10 GB"),
    "unknown medium": template(_volume(emptyDir={"medium": "RAM"}), "volumes[0].emptyDir.medium", "RAM", "Memory"),
    "absolute path in a volume": template(
        _volume(emptyDir={}),
        f"{_FIRST}.volumeMounts.subPath",
        "/x",
        container={"volumeMounts": [{"name": "a", "mountPath": "/a", "subPath": "/x"}]},
        reason=REJECTED,
    ),
    "selector key with a blank": template({"nodeSelector": {"bad key": "x"}}, "nodeSelector", "bad key"),
    "label key with a blank": job(
        {"template": {"metadata": {"labels": {"bad key": "x"}}, "spec": {"containers": [{"name": "m"}]}}},
        "template.metadata.labels",
        "bad key",
        reason=REFUSED,
    ),
    "annotation key with a blank": job(
        {"template": {"metadata": {"annotations": {"bad key": "x"}}, "spec": {"containers": [{"name": "m"}]}}},
        "template.metadata.annotations",
        "bad key",
        reason=REFUSED,
    ),
    "no terms": template(_required_terms([]), "nodeSelectorTerms", "at least one"),
    "terms on another field": template(
        _required_terms([_OTHER_FIELD]), "matchFields[0].key", "metadata.label", reason=REJECTED
    ),
    "priority class with a blank": template({"priorityClassName": "Bad Name"}, "Bad Name", reason=REJECTED),
    "unknown priority class": template({"priorityClassName": "absent"}, "absent", reason=REJECTED),
    "service account with capitals": template(
        {"serviceAccountName": "Bad_Name"}, "serviceAccountName", "Bad_Name", reason=REJECTED
    ),
    "runtime class with a blank": template({"runtimeClassName": "Bad Name"}, "Bad Name", reason=REJECTED),
    "negative user": template(
        {"securityContext": {"runAsUser": -5}}, "securityContext.runAsUser", "-5", reason=REJECTED
    ),
    "probe of nothing": container(
        {"livenessProbe": {"periodSeconds": 5}}, f"{_FIRST}.livenessProbe", "handler", reason=REJECTED
    ),
    "probe of an init container": template(
        {"initContainers": [{"name": "i", "image": "x", "livenessProbe": {"exec": {"command": ["a"]}}}]},
        "template.spec.initContainers[0].livenessProbe",
        reason=REJECTED,
    ),
    "spread over nothing": template(
        {"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologySpreadConstraints[0].topologyKey", reason=REJECTED
    ),
    "name servers of nobody": template({"dnsPolicy": "None"}, "dnsConfig", "dnsPolicy", reason=REJECTED),
}
"""Mistakes that mostly the API server finds, when Ebbtide tries the pods of a template."""

POOLS: Mapping[str, Case] = {
    "unknown kind": pool(TRAINING, {"kind": "idle"}, "spec.kind", "idle", "inference"),
    "no selector": pool(TRAINING, {"nodeSelector": None}, "spec.nodeSelector: Required"),
    "empty selector": pool(TRAINING, {"nodeSelector": {}}, "spec.nodeSelector"),
    "misspelled selector": pool(TRAINING, {"nodeSelectors": {"a": "b"}}, 'unknown field "spec.nodeSelectors"'),
    "selector of no node": pool(
        TRAINING, {"nodeSelector": {"team": "mars"}}, "nodeSelector", "team=mars", reason="NoNodeMatches"
    ),
    "unknown GPU model": pool(TRAINING, {"gpu": "h100"}, 'gpu: got "h100"', "h100-80g", "no gpu", reason=REFUSED),
    "unknown unit of memory": pool(TRAINING, {"gpuMemory": "80Gb"}, "spec.gpuMemory", "80Gb"),
    "training pool that lends": pool(TRAINING, {"lending": {"headroom": 0.1}}, "spec.lending"),
    "demand of a training pool": pool(TRAINING, {"demand": {"source": "push"}}, "spec.demand"),
    "unknown source": pool(SERVING, {"demand": {"source": "datadog"}}, "spec.demand.source", "datadog", "prometheus"),
    "no query": pool(SERVING, {"demand": {"source": "prometheus"}}, "spec.demand.query", "required"),
    "no Prometheus": pool(
        SERVING,
        {"demand": {"source": "prometheus", "query": "sum(gpus)"}},
        "EBBTIDE_PROMETHEUS_URL",
        reason="Unreachable",
    ),
    "no Deployment selector": pool(SERVING, {"demand": {"source": "deployments"}}, "spec.demand.selector", "required"),
    "selector of no Deployment": pool(
        SERVING,
        {"demand": {"source": "deployments", "selector": {"app": "mars"}}},
        "demand.selector",
        "app=mars",
        reason="NoDeploymentMatches",
    ),
    "stale at once": pool(SERVING, {"demand": {"source": "push", "staleAfter": 5}}, "spec.demand.staleAfter", "5"),
    "training pool that serves": pool(TRAINING, {"serving": [SERVED]}, "spec.serving"),
    "served model with demand of Deployments": pool(
        SERVING, {"serving": [SERVED], "demand": {"source": "deployments", "selector": {"a": "b"}}}, "spec.serving"
    ),
    "model that is served twice": pool(SERVING, {"serving": [SERVED, SERVED]}, "spec.serving[1]", "Duplicate"),
    "scaled model without a target": pool(
        SERVING, {"serving": [{**SERVED, "sizing": {"mode": "scale"}}]}, "spec.serving[0].sizing.target"
    ),
    "objective out of reach": pool(
        SERVING,
        {"serving": [{**SERVED, "objective": {"ttft": "1s", "tpot": "1ms"}}]},
        "serving.0",
        "objective.tpot",
        reason=REFUSED,
    ),
    "fewer replicas at most than at least": pool(
        SERVING,
        {"serving": [{**SERVED, "sizing": {"minReplicas": 3, "maxReplicas": 2}}]},
        "serving.0.sizing.maxReplicas",
        "2",
        reason=REFUSED,
    ),
    "certain quantile": pool(SERVING, {"lending": {"quantile": 1.5}}, "spec.lending.quantile", "1.5"),
    "negative headroom": pool(SERVING, {"lending": {"headroom": -0.1}}, "spec.lending.headroom", "-0.1"),
    "negative limit": pool(SERVING, {"lending": {"maxLentNodes": -1}}, "spec.lending.maxLentNodes", "-1"),
    "deadline of two days": pool(
        SERVING, {"lending": {"returnDeadline": "2d"}}, "lending.return", "172800", "86400", reason=REFUSED
    ),
    "no time to return": pool(
        SERVING,
        {"lending": {"returnDeadline": 0, "coldStart": 0}},
        "lending.returnDeadline",
        "above 0",
        reason=REFUSED,
    ),
    "hour 25": pool(
        SERVING, {"lending": {"blackouts": [{"start": "25h", "end": "2h"}]}}, "blackouts", "90000", reason=REFUSED
    ),
    "window without an end": pool(SERVING, {"lending": {"blackouts": [{"start": "22h"}]}}, "blackouts[0].end"),
    "window in clock time": pool(
        SERVING, {"lending": {"blackouts": [{"start": "22:00", "end": "6h"}]}}, "blackouts[0].start", "22:00"
    ),
    "window of an expression without a duration": pool(
        SERVING, {"lending": {"blackouts": [{"cron": "0 8 * * *"}]}}, "blackouts[0].duration"
    ),
    "window of an expression with an end": pool(
        SERVING, {"lending": {"blackouts": [{"cron": "0 8 * * *", "duration": "1h", "end": "6h"}]}}, "blackouts[0]"
    ),
    "expression with hour 25": pool(
        SERVING,
        {"lending": {"blackouts": [{"cron": "0 25 * * *", "duration": "1h"}]}},
        "blackouts.0.cron",
        "0 25 * * *",
        reason=REFUSED,
    ),
    "misspelt zone": pool(
        SERVING, {"lending": {"timeZone": "Europe/Berln"}}, "lending.timeZone", "Europe/Berlin", reason=REFUSED
    ),
    "event without a size": pool(
        SERVING,
        {"lending": {"knownEvents": [{"name": "launch", "start": "2026-11-27T08:00", "duration": "3h"}]}},
        "knownEvents[0].gpus",
    ),
    "profile of 23 hours": pool(SERVING, {"lending": {"demandProfile": [1] * 23}}, "spec.lending.demandProfile"),
    "unknown effect": pool(
        SERVING, {"tolerations": [{"key": "a", "effect": "NoRun"}]}, "spec.tolerations[0].effect", "NoRun"
    ),
    "toleration without a key": pool(SERVING, {"tolerations": [{"value": "b"}]}, "spec.tolerations[0].key"),
}

QUEUES: Mapping[str, Case] = {
    "limit below the guarantee": queue({"guaranteed": 9, "limit": 8}, "spec.limit", "guaranteed"),
    "negative guarantee": queue({"guaranteed": -1}, "spec.guaranteed", "-1"),
    "no weight": queue({"weight": 0}, "spec.weight", "0"),
    "weight in words": queue({"weight": "heavy"}, "spec.weight", "number"),
    "misspelled quota": queue({"guarantee": 8}, 'unknown field "spec.guarantee"'),
    "negative user limit": queue({"userLimit": -4}, "spec.userLimit", "-4"),
    "name with capitals": queue({}, "metadata.name", "Research", metadata={"name": "Research"}),
}

CASES = {
    f"{group}: {name}": case
    for group, cases in (
        ("job", JOBS),
        ("template", TEMPLATES),
        ("server", SERVER_RULES),
        ("pool", POOLS),
        ("queue", QUEUES),
    )
    for name, case in cases.items()
}
