"""Rules of Kubernetes for the pods of a template, beyond the names and types of fields.

The API server rejects a pod that breaks them, but only when the job starts. With these checks, the job is refused when
it is read. They need nothing but the template. Two are stricter: a grace period must not be negative, and the operators
Gt and Lt of a node affinity need numbers. Source: Kubernetes API reference, PodSpec.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from scheduler.documents.document import invalid_field
from scheduler.domain.quantities import parse_quantity
from scheduler.domain.suggestions import suggest

Object = Mapping[str, Any]

_LABEL_LENGTH_MAX = 63
_PORT_MAX = 65535
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_DNS_LABEL_FORM = "1 to 63 characters of a-z, 0-9 and '-', starting and ending with a letter or digit"
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII)
_LABEL_VALUE_FORM = (
    "at most 63 characters of A-Z, a-z, 0-9, '-', '_' and '.', starting and ending with a letter or digit"
)
_PREFIX_LENGTH_MAX = 253
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_KEY_FORM = f"a key that is {_LABEL_VALUE_FORM}, optionally after a DNS name and '/'"
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_MEMORY, _HUGE_PAGES = "Memory", "HugePages"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_DNS_POLICIES = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
_REQUIREMENT_VALUES: Mapping[str, str] = MappingProxyType(
    {
        "In": "at least one value",
        "NotIn": "at least one value",
        "Exists": "nothing",
        "DoesNotExist": "nothing",
        "Gt": "one whole number",
        "Lt": "one whole number",
    }
)
"""Values that a requirement of a node affinity needs, by its operator."""


def check_pod_rules(template: Object, *, reserved_volume_prefix: str) -> None:
    """Check the pods of a template whose fields exist and have values of their types.

    Args:
        reserved_volume_prefix: prefix of volumes that Ebbtide adds, which containers may mount too.

    Raises:
        PydanticCustomError: the API server would reject the pods; the error has the path of the field.
    """
    spec: Object = template["spec"]
    metadata = template.get("metadata") or {}
    _check_labels("metadata.labels", metadata.get("labels") or {})
    _check_keys("metadata.annotations", metadata.get("annotations") or {})
    _check_pod(spec)
    volumes = _check_volumes(spec.get("volumes") or ())
    _check_names(spec)
    host_ports: dict[tuple[str, int, str], str] = {}
    for path, container in _list_containers(spec):
        _check_container(path, container)
        _check_mounts(path, container, volumes, reserved_volume_prefix)
        # Init containers end before the containers start, so that both may have the same ports.
        taken = host_ports if path.startswith("spec.containers") else {}
        _check_ports(path, container, taken, is_on_host=spec.get("hostNetwork") is True)


def _list_containers(spec: Object) -> Iterator[tuple[str, Object]]:
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(kind) or ()):
            yield f"spec.{kind}[{number}]", container


def _check_pod(spec: Object) -> None:
    _check_choice("spec.dnsPolicy", spec.get("dnsPolicy"), _DNS_POLICIES)
    for field, least in (("terminationGracePeriodSeconds", 0), ("activeDeadlineSeconds", 1)):
        if (value := spec.get(field)) is not None and value < least:
            raise invalid_field(f"spec.{field}", value, f"at least {least} seconds")
    _check_labels("spec.nodeSelector", spec.get("nodeSelector") or {})
    for number, toleration in enumerate(spec.get("tolerations") or ()):
        _check_toleration(f"spec.tolerations[{number}]", toleration)
    _check_node_affinity((spec.get("affinity") or {}).get("nodeAffinity") or {})


def _check_keys(path: str, keys: Iterable[str]) -> None:
    for key in keys:
        prefix, slash, name = key.rpartition("/")
        is_prefixed = not slash or (len(prefix) <= _PREFIX_LENGTH_MAX and _DNS_NAME.fullmatch(prefix))
        if not is_prefixed or not name or len(name) > _LABEL_LENGTH_MAX or not _LABEL_VALUE.fullmatch(name):
            raise invalid_field(f"{path}[{key}]", key, _KEY_FORM)


def _check_labels(path: str, labels: Mapping[str, str]) -> None:
    _check_keys(path, labels)
    for name, value in labels.items():
        if len(value) > _LABEL_LENGTH_MAX or not _LABEL_VALUE.fullmatch(value):
            raise invalid_field(f"{path}[{name}]", value, _LABEL_VALUE_FORM)


def _check_choice(path: str, value: str | None, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        raise invalid_field(path, value, f"one of {', '.join(choices)}{suggest(value, choices)}")


def _check_toleration(path: str, toleration: Object) -> None:
    operator = toleration.get("operator") or "Equal"
    _check_choice(f"{path}.operator", operator, ("Equal", "Exists", "Gt", "Lt"))
    _check_choice(f"{path}.effect", toleration.get("effect") or None, _EFFECTS)
    if operator == "Exists" and toleration.get("value"):
        raise invalid_field(f"{path}.value", toleration["value"], "nothing with operator Exists")
    if operator != "Exists" and not toleration.get("key"):
        raise invalid_field(f"{path}.key", toleration.get("key"), "the key of a taint, unless operator is Exists")


def _check_node_affinity(affinity: Object) -> None:
    place = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (affinity.get(place) or {}).get("nodeSelectorTerms")
    if terms == []:
        path = f"spec.affinity.nodeAffinity.{place}.nodeSelectorTerms"
        raise invalid_field(path, None, "at least one term; remove the affinity to match all nodes")
    for number, term in enumerate(terms or ()):
        for index, requirement in enumerate(term.get("matchExpressions") or ()):
            path = f"spec.affinity.nodeAffinity.{place}.nodeSelectorTerms[{number}].matchExpressions[{index}]"
            _check_requirement(path, requirement)


def _check_requirement(path: str, requirement: Object) -> None:
    operator: str = requirement.get("operator") or ""
    values: Sequence[str] = requirement.get("values") or ()
    if not requirement.get("key"):
        raise invalid_field(f"{path}.key", requirement.get("key"), "the name of a node label")
    _check_choice(f"{path}.operator", operator, tuple(_REQUIREMENT_VALUES))
    needed = _REQUIREMENT_VALUES[operator]
    is_number = len(values) == 1 and re.fullmatch(r"[+-]?\d{1,18}", values[0], re.ASCII) is not None
    fits = {"nothing": not values, "at least one value": bool(values), "one whole number": is_number}[needed]
    if not fits:
        raise invalid_field(f"{path}.values", ", ".join(values) or None, f"{needed} with operator {operator}")


def _check_volumes(volumes: Sequence[Object]) -> frozenset[str]:
    """Check the volumes, and return their names."""
    names: dict[str, str] = {}
    for number, volume in enumerate(volumes):
        path = f"spec.volumes[{number}]"
        _check_unique_name(f"{path}.name", volume.get("name"), names)
        if len(sources := [field for field in volume if field != "name"]) > 1:
            raise invalid_field(path, ", ".join(sources), "one source beside its name; without one it is an emptyDir")
        _check_empty_dir(f"{path}.emptyDir", volume.get("emptyDir") or {})
    return frozenset(names)


def _check_empty_dir(path: str, source: Object) -> None:
    """Check a scratch folder. The API server accepts any medium, but kubelet mounts none that it does not know."""
    limit, medium = source.get("sizeLimit"), source.get("medium") or ""
    if limit is not None and ((amount := parse_quantity(limit)) is None or amount < 0):
        raise invalid_field(f"{path}.sizeLimit", limit, "a quantity such as 10Gi")
    if medium not in ("", _MEMORY) and not medium.startswith(_HUGE_PAGES):
        raise invalid_field(f"{path}.medium", medium, f"nothing, {_MEMORY} or {_HUGE_PAGES}, alone or with -SIZE")


def _check_names(spec: Object) -> None:
    """Check the names of all containers. Ebbtide names the first one if it has no name."""
    names: dict[str, str] = {}
    for path, container in _list_containers(spec):
        is_first = path == "spec.containers[0]"
        if "name" in container or not is_first:
            _check_unique_name(f"{path}.name", container.get("name"), names)
        if not is_first and not container.get("image"):
            raise invalid_field(
                f"{path}.image", container.get("image"), "a container image; only the first may omit it"
            )


def _check_unique_name(path: str, name: str | None, known: dict[str, str]) -> None:
    """Check a name that must be a DNS label and unique among `known`, which are paths by name. Add it to them."""
    if name is None or len(name) > _LABEL_LENGTH_MAX or not _DNS_LABEL.fullmatch(name):
        raise invalid_field(path, name, _DNS_LABEL_FORM)
    if name in known:
        raise invalid_field(path, name, f"a unique name; {known[name]} has it too")
    known[name] = path


def _check_container(path: str, container: Object) -> None:
    _check_choice(f"{path}.imagePullPolicy", container.get("imagePullPolicy"), _PULL_POLICIES)
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for name, amount in (resources.get("requests") or {}).items():
        requested, limit = parse_quantity(amount), parse_quantity(limits.get(name))
        if requested is not None and limit is not None and requested > limit:
            raise invalid_field(f"{path}.resources.requests[{name}]", amount, f"at most {limits[name]}, its limit")
    _check_extended_resources(f"{path}.resources", resources.get("requests") or {}, limits)


def _check_extended_resources(path: str, requests: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
    """Check resources with a domain: whole numbers that cannot be overcommitted."""
    for name in (each for each in (*requests, *limits) if "/" in each and not _is_native(each)):
        limit, request = parse_quantity(limits.get(name)), parse_quantity(requests.get(name))
        for kind, amounts, amount in (("limits", limits, limit), ("requests", requests, request)):
            if amount is not None and amount != int(amount):
                raise invalid_field(f"{path}.{kind}[{name}]", amounts[name], "a whole number")
        if limit is None:
            raise invalid_field(f"{path}.limits[{name}]", None, f"{requests[name]}, a limit equal to its request")
        if request is not None and request != limit:
            raise invalid_field(f"{path}.requests[{name}]", requests[name], f"{limits[name]}, its limit")


def _is_native(resource: str) -> bool:
    return resource.partition("/")[0].endswith("kubernetes.io")


def _check_mounts(path: str, container: Object, volumes: frozenset[str], reserved_prefix: str) -> None:
    places: dict[str, str] = {}
    for number, mount in enumerate(container.get("volumeMounts") or ()):
        place, name, target = f"{path}.volumeMounts[{number}]", mount.get("name"), mount.get("mountPath")
        if not name or (name not in volumes and not name.startswith(reserved_prefix)):
            known = ", ".join(sorted(volumes)) or "none"
            allowed = f"the name of a volume in spec.volumes ({known}){suggest(name or '', volumes)}"
            raise invalid_field(f"{place}.name", name, allowed)
        if not target:
            raise invalid_field(f"{place}.mountPath", target, "a path in the container")
        if target in places:
            raise invalid_field(f"{place}.mountPath", target, f"a unique path; {places[target]} has it too")
        places[target] = f"{place}.mountPath"


def _check_ports(path: str, container: Object, taken: dict[tuple[str, int, str], str], *, is_on_host: bool) -> None:
    """Check the ports. `taken` are the paths of those that earlier containers have on the node; adds to them."""
    for number, port in enumerate(container.get("ports") or ()):
        place, inside, protocol = f"{path}.ports[{number}]", port.get("containerPort"), port.get("protocol") or "TCP"
        _check_choice(f"{place}.protocol", protocol, _PROTOCOLS)
        on_node = port.get("hostPort") or (inside if is_on_host else None)
        for field, value in (("containerPort", inside), ("hostPort", inside if on_node is None else on_node)):
            if value is None or not 1 <= value <= _PORT_MAX:
                raise invalid_field(f"{place}.{field}", value, f"a port from 1 to {_PORT_MAX}")
        if on_node is None:
            continue
        if is_on_host and on_node != inside:
            raise invalid_field(f"{place}.hostPort", on_node, f"{inside}, its containerPort, because of hostNetwork")
        key = (port.get("hostIP") or "", on_node, protocol)
        if key in taken:
            raise invalid_field(f"{place}.hostPort", on_node, f"a unique port; {taken[key]} has it")
        taken[key] = f"{place}.hostPort"
