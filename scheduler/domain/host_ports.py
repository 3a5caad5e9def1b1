"""Host ports of pods as resources of their node, so that they are counted as CPU and memory are.

A port is whole on every node and never listed as allocatable. A pod that binds it on all addresses requests all of it.
A pod that binds it on one address requests all of that address's port and one share of the port itself. So two pods
conflict exactly if the Kubernetes scheduler and kubelet say so.

Sources: Kubernetes' HostPortInfo and the scheduler's plugin NodePorts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PREFIX = "hostPort/"
_WHOLE = 2**16
_ALL_ADDRESSES = "0.0.0.0"
_DEFAULT_PROTOCOL = "TCP"


def compute_port_requests(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the host ports that a pod with this spec requests, by the name of the resource.

    Ports of containers and of sidecars (init containers that restart always) count. On the host's network, each port of
    a container is a host port.
    """
    sidecars = (each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always")
    on_host, requests = bool(spec.get("hostNetwork")), dict[str, int]()
    for protocol, port, address in {
        each
        for container in (*(spec.get("containers") or ()), *sidecars)
        for each in _list_ports(container, is_on_host=on_host)
    }:
        name = f"{_PREFIX}{protocol}/{port}"
        if address == _ALL_ADDRESSES:
            requests[name] = _WHOLE
        else:
            requests[name] = min(_WHOLE, requests.get(name, 0) + 1)
            requests[f"{name}/{address}"] = _WHOLE
    return requests


def find_amount(amounts: Mapping[str, int], name: str) -> int:
    """Return the amount of a resource. One that is not listed has nothing, except a host port, which is whole."""
    found = amounts.get(name)
    if found is not None:
        return found
    return _WHOLE if name.startswith(_PREFIX) else 0


def format_host_port(name: str) -> str:
    """Return the host port for people, for example `host port 8080/TCP`, or an empty string for other resources."""
    if not name.startswith(_PREFIX):
        return ""
    protocol, port, *address = name.removeprefix(_PREFIX).split("/")
    return f"host port {port}/{protocol}" + (f" of address {address[0]}" if address else "")


def _list_ports(container: Mapping[str, Any], *, is_on_host: bool) -> Iterator[tuple[str, int, str]]:
    for each in container.get("ports") or ():
        port = each.get("hostPort") or (each.get("containerPort") if is_on_host else None)
        if port:
            yield each.get("protocol") or _DEFAULT_PROTOCOL, int(port), each.get("hostIP") or _ALL_ADDRESSES
