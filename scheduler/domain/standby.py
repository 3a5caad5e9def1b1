"""Standby replicas: they stay on their node while it is lent, asleep or idle, and serve when it comes back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

PORT_MAX = 65_535
TIMEOUT_S = 60.0
TIMEOUT_S_MAX = 3_600.0
RETRY_S = 900.0
"""Time without a new loan of a node whose replica did not fall asleep."""
LEVELS = (1, 2)
"""Sleep levels of vLLM. Level 1 moves the weights to host memory, level 2 drops them."""
SELECTOR_LABELS_MAX = 16
DRAIN_S = 30.0
GPU_INDEX_MAX = 1023
NODE_PLACEHOLDER = "{node}"
URL_FORM = "an http or https URL such as http://{node}:8000, without user, query and fragment"
URL_LENGTH_MAX = 512
_VISIBLE = re.compile(r"[!-~]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


class StandbyMode(StrEnum):
    """How replicas free their node for training.

    SLEEP: their engine sleeps and releases most of its GPU memory. WARM: they get no requests, and keep their memory.
    """

    SLEEP = "sleep"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class Standby:
    """How the replicas of a pool stay on their nodes while these are lent.

    The replicas on a node are the pods in `namespace` with all labels of `selector`, on Kubernetes. They request no GPU
    there, because a pod keeps the GPUs that it requests. On machines, the replica of a node is the engine at `url`.

    Args:
        port: of the HTTP API of an engine in a pod, which offers vLLM's `/sleep`, `/wake_up` and `/is_sleeping`.
        level: sleep level, one of `LEVELS`.
        gpu_memory_bytes: memory that idle replicas keep on each of their GPUs.
        host_memory_bytes: memory that idle replicas keep on their node in total.
        wake_s: expected time from the return of a node until its replicas serve; None for the pool's `cold_start_s`.
        timeout_s: time within which a replica must be idle, or serve again.
        url: base URL of the engine's HTTP API, with `NODE_PLACEHOLDER` for the name of its node; empty on Kubernetes.
        gpus: indexes of the GPUs that the engine at `url` uses; empty for all GPUs of its node.
        drain_s: time in which a warm replica completes its requests after it gets no new ones.
    """

    namespace: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    port: int = 8000
    level: int = 1
    gpu_memory_bytes: int = 0
    host_memory_bytes: int = 0
    wake_s: float | None = None
    timeout_s: float = TIMEOUT_S
    mode: StandbyMode = StandbyMode.SLEEP
    url: str = ""
    gpus: tuple[int, ...] = ()
    drain_s: float = DRAIN_S

    def __post_init__(self) -> None:
        self._check_place()
        if not 1 <= self.port <= PORT_MAX:
            raise ValueError(f"lending.standby.port must be 1 to {PORT_MAX}, got {self.port}")
        if self.level not in LEVELS:
            raise ValueError(f"lending.standby.level must be 1 or 2, got {self.level}")
        for name in ("gpu_memory_bytes", "host_memory_bytes", "wake_s"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ValueError(f"lending.standby.{name} must be at least 0, got {value}")
        if not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            limits = f"above 0 and at most {TIMEOUT_S_MAX:g}"
            raise ValueError(f"lending.standby.timeout_s must be {limits}, got {self.timeout_s}")
        if not 0 <= self.drain_s <= TIMEOUT_S_MAX:
            raise ValueError(f"lending.standby.drain_s must be 0 to {TIMEOUT_S_MAX:g}, got {self.drain_s}")
        if self.mode is StandbyMode.WARM and not self.gpu_memory_bytes:
            raise ValueError(
                "lending.standby.gpu_memory_bytes must be above 0 with mode warm, got 0. State the memory that a "
                "replica keeps on each GPU"
            )

    def _check_place(self) -> None:
        """Check where the replicas are: pods with labels, or engines at URLs."""
        if self.url:
            if self.namespace or self.selector:
                raise ValueError("lending.standby.url and lending.standby.selector are both set. Set one of them")
            if not is_engine_url(self.url):
                raise ValueError(f"lending.standby.url must be {URL_FORM}, got {self.url!r}")
            if self.mode is not StandbyMode.SLEEP:
                raise ValueError("lending.standby.mode must be sleep with lending.standby.url, got warm")
        else:
            if not self.namespace:
                raise ValueError("lending.standby.namespace is empty. Name the namespace of the replicas, or set url")
            if not 1 <= len(self.selector) <= SELECTOR_LABELS_MAX:
                labels = f"1 to {SELECTOR_LABELS_MAX} labels"
                raise ValueError(f"lending.standby.selector must have {labels}, got {len(self.selector)}")
        if self.gpus and not self.url:
            raise ValueError("lending.standby.gpus is supported with lending.standby.url only. Remove it")
        if list(self.gpus) != sorted(set(self.gpus)) or not all(0 <= each <= GPU_INDEX_MAX for each in self.gpus):
            indexes = f"ascending indexes from 0 to {GPU_INDEX_MAX}"
            raise ValueError(f"lending.standby.gpus must have {indexes}, got {list(self.gpus)}")

    def count_kept_bytes(self, indices: Iterable[int]) -> int:
        """Return the most memory that idle replicas keep on one of these GPUs of a node."""
        is_shared = not self.gpus or not set(self.gpus).isdisjoint(indices)
        return self.gpu_memory_bytes if is_shared else 0

    def find_node_obstacle(self, gpus: int, gpu_memory_bytes: int) -> str:
        """Return why a node with these GPUs can never be lent, or an empty string."""
        if self.gpu_memory_bytes >= gpu_memory_bytes:
            return (
                f"lending.standby.gpu_memory_bytes is {self.gpu_memory_bytes}, but a GPU of the node has "
                f"{gpu_memory_bytes} bytes. State less"
            )
        if self.gpus and self.gpus[-1] >= gpus:
            return f"lending.standby.gpus names GPU {self.gpus[-1]}, but the node has {gpus} GPUs"
        return ""

    def engine_url(self, node: str) -> str:
        """Return the base URL of the engine on a node."""
        return self.url.replace(NODE_PLACEHOLDER, node).rstrip("/")

    def matches(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return whether a pod is one of the replicas."""
        return namespace == self.namespace and all(labels.get(name) == value for name, value in self.selector.items())


def is_engine_url(url: str) -> bool:
    """Return whether `url` is the base URL of an engine, as `URL_FORM` describes it."""
    try:
        parts = urlsplit(url.replace(NODE_PLACEHOLDER, "node"))
        host, port = parts.netloc, parts.port
    except ValueError:
        return False
    if port is not None:
        host = host.rpartition(":")[0]
    is_plain = parts.scheme in ("http", "https") and not parts.query and not parts.fragment
    is_complete = len(url) <= URL_LENGTH_MAX and port != 0 and not url.endswith(("?", "#"))
    is_complete = is_complete and _VISIBLE.fullmatch(url) is not None  # urlsplit drops line breaks and spaces
    return bool(is_plain and is_complete and _HOST.fullmatch(host) and _PATH.fullmatch(parts.path.rstrip("/")))


class StandbyPhase(StrEnum):
    """State of the replicas on a node.

    ASLEEP: they sleep, or stay warm without requests. ABSENT: the node has none that can. SLEEP_FAILED and WAKE_FAILED:
    a replica did not become idle, or did not serve again.
    """

    AWAKE = "awake"
    ASLEEP = "asleep"
    ABSENT = "absent"
    SLEEP_FAILED = "sleep_failed"
    WAKE_FAILED = "wake_failed"


@dataclass(frozen=True, slots=True)
class StandbyState:
    """The replicas on a node of a pool with a standby, as last observed.

    `detail` says why they are absent or have failed. After a failure to fall asleep, `failure` keeps the detail, and
    the node is not lent before `retry_at_s`.
    """

    phase: StandbyPhase
    since_s: float
    detail: str = ""
    failure: str = ""
    retry_at_s: float = 0.0

    def find_loan_obstacle(self, now_s: float) -> str:
        """Return why the node cannot be lent now, or an empty string."""
        if self.phase in (StandbyPhase.ABSENT, StandbyPhase.WAKE_FAILED):
            return self.detail
        return self.failure if now_s < self.retry_at_s else ""


def advance_standby(known: StandbyState | None, phase: StandbyPhase, detail: str, now_s: float) -> StandbyState:
    """Return the state after an observation: the known object if it says nothing new."""
    is_repeated = known is not None and phase is known.phase
    if known is not None and is_repeated and (detail == known.detail or phase is StandbyPhase.SLEEP_FAILED):
        return known
    since_s = known.since_s if known is not None and is_repeated else now_s
    if phase is StandbyPhase.SLEEP_FAILED:
        return StandbyState(phase, since_s, detail, detail, now_s + RETRY_S)
    if phase is StandbyPhase.ASLEEP or known is None:
        return StandbyState(phase, since_s, detail)
    return StandbyState(phase, since_s, detail, known.failure, known.retry_at_s)
