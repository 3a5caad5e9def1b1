"""Warm replicas: the label that takes and gives requests, the time to drain, and what failures cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from scheduler.domain.observation import StandbyFacts
from scheduler.domain.standby import Standby, StandbyMode, StandbyPhase
from scheduler.executors.engine_sleep import ReplicaError
from scheduler.executors.standby_replicas import StandbyOrder, StandbyReplica, StandbyReplicas
from scheduler.kubernetes.api_error import NO_RESPONSE, ApiError
from scheduler.kubernetes.api_objects import SERVING_LABEL, Object
from scheduler.kubernetes.client import ObjectList
from scheduler.kubernetes.warm_replicas import SERVICES_TTL_S, WarmControl
from scheduler.store.protocol import FencedError
from tests.kubernetes.waiting import eventually

STANDBY = Standby("chat", {"app": "llm"}, gpu_memory_bytes=1, mode=StandbyMode.WARM, timeout_s=10.0, drain_s=30.0)
REPLICA = StandbyReplica("uid", "i0", "pod chat/llm-0", namespace="chat", name="llm-0")
SELECTOR = {"app": "llm", SERVING_LABEL: "true"}


class Api:
    """One pod and one Service, and a clock that advances with each wait."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.uid = "uid"
        self.labels = {"app": "llm", SERVING_LABEL: "true"}
        self.selector: dict[str, str] | None = SELECTOR
        self.is_ready = True
        self.error: Exception | None = None
        self.patches = 0
        self.lists = 0
        self.control = WarmControl(cast(Any, self), monotonic_s=lambda: self.now_s, sleep=self._wait)

    def get_or_none(self, kind: object, name: str, namespace: str) -> Object:
        condition = {"type": "Ready", "status": str(self.is_ready)}
        return {"metadata": {"uid": self.uid, "labels": dict(self.labels)}, "status": {"conditions": [condition]}}

    def list(self, kind: object, *, namespace: str) -> ObjectList:
        self.lists += 1
        service: Object = {"metadata": {"name": "llm", "namespace": namespace}, "spec": {"selector": self.selector}}
        return ObjectList((service,), "1")

    def patch(self, kind: object, name: str, namespace: str, *, change: Object) -> None:
        if self.error is not None:
            raise self.error
        assert change["metadata"]["uid"] == self.uid
        self.patches += 1
        self.labels |= change["metadata"]["labels"]

    def bring(self, *, asleep: bool, is_wanted: bool = True) -> bool:
        order = StandbyOrder("i0", STANDBY, asleep=asleep, replicas=(REPLICA,))
        return self.control.bring(REPLICA, order, is_wanted=lambda: is_wanted)

    def _wait(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def api() -> Api:
    return Api()


def test_label_follows_the_order_and_is_written_once(api: Api) -> None:
    for asleep, value in ((True, "false"), (True, "false"), (False, "true"), (False, "true")):
        assert api.bring(asleep=asleep)
        assert api.labels[SERVING_LABEL] == value
    assert api.patches == 2


@pytest.mark.parametrize("selector", [{"app": "llm"}, {}, None, {"app": "web"}])
def test_service_that_selects_an_idle_replica_forbids_the_loan(api: Api, selector: dict[str, str] | None) -> None:
    api.selector = selector
    if selector == {"app": "llm"}:
        with pytest.raises(ReplicaError, match="chat/llm"):
            api.bring(asleep=True)
        assert api.labels[SERVING_LABEL] == "true"
    else:
        assert api.bring(asleep=True)


def test_services_of_a_namespace_are_read_once_for_many_replicas(api: Api) -> None:
    for _ in range(5):
        api.labels[SERVING_LABEL] = "true"
        api.bring(asleep=True)
    assert api.lists == 1
    api.now_s += SERVICES_TTL_S
    api.labels[SERVING_LABEL] = "true"
    api.bring(asleep=True)
    assert api.lists == 2


def test_replica_that_is_not_ready_in_time_has_failed(api: Api) -> None:
    api.is_ready = False
    assert api.bring(asleep=True), "an idle replica need not be ready"
    began_s = api.now_s
    with pytest.raises(ReplicaError):
        api.bring(asleep=False)
    assert api.now_s - began_s <= STANDBY.timeout_s


@pytest.mark.parametrize(
    "error", [ApiError(503, "", ""), ApiError(NO_RESPONSE, "", ""), ApiError(409, "Conflict", ""), FencedError("late")]
)
@pytest.mark.parametrize("asleep", [True, False])
def test_nothing_is_known_without_an_answer_of_the_api_server(api: Api, error: Exception, asleep: bool) -> None:
    api.labels[SERVING_LABEL] = str(asleep).lower()
    api.error = error
    assert not api.bring(asleep=asleep)


def test_missing_permission_is_an_error(api: Api) -> None:
    api.error = ApiError(403, "Forbidden", "")
    with pytest.raises(ReplicaError, match="warmStandbys"):
        api.bring(asleep=True)


def test_pod_that_was_replaced_and_withdrawn_orders_change_nothing(api: Api) -> None:
    assert not api.bring(asleep=True, is_wanted=False)
    api.uid = "other"
    assert not api.bring(asleep=True)
    assert api.patches == 0


class Replicas:
    """The followed orders of one warm replica, whose control obeys at once or fails."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.problem = ""
        self.followed = StandbyReplicas(warm=self, threads=1, recheck_s=0.0, monotonic_s=lambda: self.now_s)

    def bring(self, replica: StandbyReplica, order: StandbyOrder, **_: object) -> bool:
        if self.problem:
            raise ReplicaError(self.problem)
        return True

    def observe(self, *, asleep: bool, is_offered: bool = False) -> StandbyFacts:
        order = StandbyOrder("i0", STANDBY, asleep=asleep, replicas=(REPLICA,), is_offered=is_offered)
        self.followed.follow({"i0": order}, self.now_s)
        return self.followed.list_facts(self.now_s)["i0"]

    def until(self, phase: StandbyPhase, *, asleep: bool) -> None:
        eventually(lambda: self.observe(asleep=asleep).phase is phase, what=f"phase {phase}", timeout_s=20.0)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    made = Replicas()
    yield made
    made.followed.close()


def test_node_is_free_once_the_requests_had_time_to_end(replicas: Replicas) -> None:
    replicas.until(StandbyPhase.AWAKE, asleep=False)
    assert replicas.followed.has_news()
    replicas.observe(asleep=True)
    eventually(replicas.followed.has_news, what="it gets no new requests")
    replicas.now_s += STANDBY.drain_s - 1.0
    assert replicas.observe(asleep=True).phase is None
    assert not replicas.followed.has_news()
    replicas.now_s += 1.0
    assert replicas.followed.has_news(), "a tick follows at once"
    assert replicas.observe(asleep=True).phase is StandbyPhase.ASLEEP


def test_replica_that_serves_on_a_lent_node_is_reported_and_stays(replicas: Replicas) -> None:
    replicas.problem = "Service chat/llm would still send requests to it"
    replicas.until(StandbyPhase.SLEEP_FAILED, asleep=True)
    assert list(replicas.followed.list_failed()) == []
    replicas.until(StandbyPhase.WAKE_FAILED, asleep=False)
    assert list(replicas.followed.list_failed()) == [REPLICA]
