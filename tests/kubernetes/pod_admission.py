"""Admission of pods as kubelet does it, computed from API objects with code of its own.

Sources: kubelet's predicate.go; Kubernetes documentation, "Assigning Pods to Nodes" and "Taints and Tolerations".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from scheduler.kubernetes.api_objects import GPU_RESOURCE, Object

Rejection = tuple[str, str]
"""Reason and message."""
BROKEN_DEVICES: Rejection = (
    "UnexpectedAdmissionError",
    "Pod was rejected: Allocate failed: no healthy devices present",
)
"""Rejection by a node whose GPUs have failed."""
EVERYWHERE = "0.0.0.0"
BUILT_IN = ("cpu", "memory", "ephemeral-storage", "pods")


def find_rejection(pod: Object, node: Object, others: Iterable[Object]) -> Rejection | None:
    """Return why kubelet of the node rejects the pod beside the other pods that it has admitted, or None."""
    others = tuple(others)
    return (
        _check_resources(pod, node, others)
        or _check_affinity(pod, node)
        or _check_ports(pod, others)
        or _check_taints(pod, node)
    )


def find_scheduling_misfit(pod: Object, node: Object) -> str:
    """Return why the Kubernetes scheduler would not choose a node whose kubelet may admit the pod.

    That is a taint that the pod does not tolerate, or a resource that the node does not have.
    """
    missing = [name for name, amount in sum_requests(pod).items() if amount and name not in _allocatable(node)]
    if missing:
        return missing[0]
    return _find_taint(pod, node, ("NoSchedule", "NoExecute"))


def sum_requests(pod: Object) -> Counter[str]:
    spec = pod["spec"]
    steady: Counter[str] = Counter({"pods": 1})
    for container in spec["containers"]:
        steady.update(_requests(container))
    sidecars: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for container in spec.get("initContainers") or ():
        own = _requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars.update(own)
            own = Counter()
        peak |= own + sidecars
    overhead = Counter({name: _amount(name, value) for name, value in (spec.get("overhead") or {}).items()})
    return ((steady + sidecars) | peak) + overhead


def _requests(container: Object) -> Counter[str]:
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return Counter({name: _amount(name, value) for name, value in amounts.items()})


def _amount(name: str, value: str) -> int:
    quantity: Decimal = parse_quantity(value)  # type: ignore[no-untyped-call]
    return int((quantity * (1000 if name == "cpu" else 1)).to_integral_value(rounding="ROUND_CEILING"))


def _allocatable(node: Object) -> dict[str, int]:
    return {name: _amount(name, value) for name, value in node["status"]["allocatable"].items()}


def _check_resources(pod: Object, node: Object, others: Iterable[Object]) -> Rejection | None:
    allocatable = _allocatable(node)
    used: Counter[str] = Counter()
    for other in others:
        used.update(sum_requests(other))
    for name, amount in sorted(sum_requests(pod).items()):
        if name not in allocatable and name not in BUILT_IN:
            continue  # kubelet ignores resources that its node does not have
        if amount and used[name] + amount > allocatable.get(name, 0):
            text = f"requested: {amount}, used: {used[name]}, capacity: {allocatable.get(name, 0)}"
            if name == GPU_RESOURCE:
                return "UnexpectedAdmissionError", f"Pod was rejected: Allocate failed due to {name}, {text}"
            return f"OutOf{name}", f"Pod was rejected: Node didn't have enough resource: {name}, {text}"
    return None


def _check_affinity(pod: Object, node: Object) -> Rejection | None:
    labels, spec = node["metadata"].get("labels") or {}, pod["spec"]
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    matches = all(labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())
    if matches and affinity is not None:
        matches = any(_term_matches(term, node["metadata"]["name"], labels) for term in affinity["nodeSelectorTerms"])
    return None if matches else ("NodeAffinity", "Pod was rejected: Predicate NodeAffinity failed")


def _term_matches(term: Object, name: str, labels: dict[str, str]) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_holds(each, labels) for each in expressions) and all(
        _holds(each, {"metadata.name": name}) for each in fields
    )


def _holds(expression: Object, labels: dict[str, str]) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or []
    has, value = key in labels, labels.get(key, "")
    if operator == "In":
        return has and bool(value in values)
    if operator == "NotIn":
        return not has or bool(value not in values)
    if operator in ("Exists", "DoesNotExist"):
        return has == bool(operator == "Exists")
    if not has or not value.lstrip("-").isdigit():
        return False
    return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])


def _check_ports(pod: Object, others: Iterable[Object]) -> Rejection | None:
    used = [port for other in others for port in list_host_ports(other)]
    for protocol, number, address in list_host_ports(pod):
        for used_protocol, used_number, used_address in used:
            is_same = (protocol, number) == (used_protocol, used_number)
            if is_same and (address == used_address or EVERYWHERE in (address, used_address)):
                text = "node(s) didn't have free ports for the requested pod ports"
                return "NodePorts", f"Pod was rejected: Predicate NodePorts failed: {text}"
    return None


def list_host_ports(pod: Object) -> list[tuple[str, int, str]]:
    """Return protocol, number and address of each host port of the pod, as the API server stores it."""
    spec = pod["spec"]
    sidecars = [each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
    return [
        (port.get("protocol") or "TCP", port["hostPort"], port.get("hostIP") or EVERYWHERE)
        for container in [*spec["containers"], *sidecars]
        for port in container.get("ports") or ()
        if port.get("hostPort")
    ]


def _check_taints(pod: Object, node: Object) -> Rejection | None:
    taint = _find_taint(pod, node, ("NoExecute",))
    return ("TaintToleration", f"Pod was rejected: Predicate TaintToleration failed: {taint}") if taint else None


def _find_taint(pod: Object, node: Object, effects: Iterable[str]) -> str:
    for taint in node["spec"].get("taints") or ():
        if taint["effect"] in effects and not any(
            _tolerates(each, taint) for each in pod["spec"].get("tolerations") or ()
        ):
            return str(taint["key"])
    return ""


def _tolerates(toleration: dict[str, str], taint: dict[str, str]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and bool((toleration.get("value") or "") == (taint.get("value") or ""))
