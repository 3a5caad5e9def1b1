"""Retries, rate limits and errors of API requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import CONFIG_MAP, NODE, Object
from scheduler.kubernetes.client import EvictionResult, KubernetesClient, connect
from scheduler.kubernetes.connection import NoClusterError
from scheduler.kubernetes.flow_control import ClientLimits, RequestRecord
from scheduler.store.protocol import FencedError
from tests.loopback import find_free_port
from tests.unit.kubernetes.scripted_server import Answer, ScriptedServer

QUICK = ClientLimits(qps=1_000, burst=1_000, connect_timeout_s=2.0, read_timeout_s=0.5, retry_timeout_s=10.0)
OVERLOAD = Answer(429, "Too many requests, please try again later.\n", {"Retry-After": "0"})
BROKEN = Answer(503, {"kind": "Status", "code": 503, "reason": "ServiceUnavailable"})
CUT = Answer(cut=True)
EXISTS = Answer(409, {"kind": "Status", "code": 409, "reason": "AlreadyExists"})
CONFLICT = Answer(409, {"kind": "Status", "code": 409, "reason": "Conflict"})
MINE: Object = {"metadata": {"name": "c", "namespace": "ns", "annotations": {"epoch": "4"}}}
POD: Object = {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {}}
MADE: Object = {"metadata": {**MINE["metadata"], "managedFields": [{"manager": "ebbtide"}]}}
Script = Callable[..., tuple[KubernetesClient, ScriptedServer, list[RequestRecord]]]


def kubeconfig(folder: Path, url: str, **user: str) -> Path:
    document = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    with ExitStack() as stack:

        def start(
            *answers: Answer, limits: ClientLimits = QUICK, may_write: Callable[[], bool] = lambda: True
        ) -> tuple[KubernetesClient, ScriptedServer, list[RequestRecord]]:
            server = stack.enter_context(ScriptedServer(*answers).running())
            asked: list[RequestRecord] = []
            path = kubeconfig(tmp_path, server.url, token="secret")
            cluster = connect(path, limits=limits, on_request=asked.append, may_write=may_write, rng=Random(1))
            stack.callback(cluster.close)
            return cluster, server, asked

        yield start


def test_read_is_retried_and_each_attempt_is_recorded(script: Script) -> None:
    cluster, _, asked = script(OVERLOAD, BROKEN, CUT, Answer(after_s=0.8), Answer(body=MADE))
    assert cluster.get(CONFIG_MAP, "c", "ns") == MADE
    assert [(each.verb, each.resource, each.status) for each in asked] == [
        ("get", "configmaps", status) for status in (429, 503, 0, 0, 200)
    ]


def test_fenced_process_can_read_but_not_retry_writes(tmp_path: Path) -> None:
    with ScriptedServer(BROKEN, Answer(body=MADE)).running() as server:
        cluster = connect(
            kubeconfig(tmp_path, server.url), limits=QUICK, may_write=lambda: not server.heard, rng=Random(1)
        )
        with pytest.raises(FencedError, match="not the leader"):
            cluster.apply(CONFIG_MAP, MINE)
        assert len(server.heard) == 1
        assert cluster.get(CONFIG_MAP, "c", "ns") == MADE
        cluster.close()


def test_bearer_token_is_sent(script: Script) -> None:
    cluster, server, _ = script(Answer(body=MADE))
    cluster.get(CONFIG_MAP, "c", "ns")
    assert server.tokens == ["Bearer secret"]


def test_former_leader_cannot_write(script: Script) -> None:
    """A converge with many steps can outlast a Lease, and its last steps would undo the next leader's."""
    leading = [True, False]
    cluster, _, asked = script(BROKEN, Answer(body=MADE), may_write=lambda: leading.pop(0))
    with pytest.raises(FencedError, match="apply of configmaps"):
        cluster.apply(CONFIG_MAP, MINE)
    assert [each.status for each in asked] == [503]
    assert cluster.get(CONFIG_MAP, "c", "ns") == MADE, "reads stay allowed"


def test_retries_end_at_the_timeout(script: Script) -> None:
    cluster, server, _ = script(*[BROKEN] * 50, limits=ClientLimits(retry_timeout_s=1.0, read_timeout_s=0.5))
    with pytest.raises(ApiError) as caught:
        cluster.get(NODE, "n")
    assert caught.value.status == 503
    assert 2 <= len(server.heard) <= 6


def test_retry_after_beyond_the_timeout_is_not_retried(script: Script) -> None:
    cluster, server, _ = script(Answer(429, "later", {"Retry-After": "60"}))
    with pytest.raises(ApiError) as caught:
        cluster.get(NODE, "n")
    assert caught.value.retry_after_s == 60.0
    assert len(server.heard) == 1


def test_permanent_errors_are_not_retried(script: Script) -> None:
    cluster, server, _ = script(Answer(422, {"kind": "Status", "code": 422, "reason": "Invalid", "message": "gpus"}))
    with pytest.raises(ApiError, match="422 Invalid: gpus") as caught:
        cluster.apply(CONFIG_MAP, MINE)
    assert caught.value.is_invalid
    assert len(server.heard) == 1


@pytest.mark.parametrize("doubt", [CUT, BROKEN])
def test_create_succeeds_if_an_ambiguous_attempt_created_the_object(script: Script, doubt: Answer) -> None:
    cluster, server, _ = script(doubt, EXISTS, Answer(body=MADE))
    assert cluster.create(CONFIG_MAP, MINE) == MADE
    assert server.heard == [*["POST /api/v1/namespaces/ns/configmaps"] * 2, "GET /api/v1/namespaces/ns/configmaps/c"]


def test_create_fails_if_another_client_created_the_object(script: Script) -> None:
    other = {"metadata": {**MADE["metadata"], "annotations": {"epoch": "5"}}}
    cluster, _, _ = script(CUT, EXISTS, Answer(body=other))
    with pytest.raises(ApiError) as caught:
        cluster.create(CONFIG_MAP, MINE)
    assert caught.value.is_already_exists


def test_already_exists_without_ambiguity_is_not_read_back(script: Script) -> None:
    cluster, server, _ = script(OVERLOAD, EXISTS)
    with pytest.raises(ApiError) as caught:
        cluster.create(CONFIG_MAP, MINE)
    assert caught.value.is_already_exists
    assert len(server.heard) == 2


def test_unguarded_json_patch_is_retried_only_after_429(script: Script) -> None:
    cluster, server, _ = script(OVERLOAD, CUT)
    with pytest.raises(ApiError) as caught:
        cluster.patch(NODE, "n", change=[{"op": "add", "path": "/spec/taints/-", "value": {}}])
    assert caught.value.is_ambiguous
    assert len(server.heard) == 2


def test_bind_succeeds_if_the_pod_is_bound_to_the_node(script: Script) -> None:
    cluster, _, _ = script(CUT, CONFLICT, Answer(body={**POD, "spec": {"nodeName": "n"}}))
    cluster.bind(POD, "n")


@pytest.mark.parametrize("uid", ["u", "another"])
def test_bind_conflicts_if_pod_or_node_differ(script: Script, uid: str) -> None:
    found = {"metadata": {**POD["metadata"], "uid": uid}, "spec": {"nodeName": "n" if uid == "another" else "m"}}
    cluster, _, _ = script(CONFLICT, Answer(body=found))
    with pytest.raises(ApiError) as caught:
        cluster.bind(POD, "n")
    assert caught.value.is_conflict


def test_eviction_is_retried_after_overload_but_not_after_budget(script: Script) -> None:
    status = {"code": 429, "reason": "TooManyRequests", "details": {"causes": [{"reason": "DisruptionBudget"}]}}
    cluster, server, _ = script(OVERLOAD, Answer(429, {"kind": "Status", **status}, {"Retry-After": "0"}))
    assert cluster.evict(POD) is EvictionResult.BLOCKED
    assert len(server.heard) == 2


def test_invalid_json_counts_as_no_response(script: Script) -> None:
    cluster, _, asked = script(Answer(body="<html>a proxy's greeting</html>"), Answer(body=MADE))
    assert cluster.get(CONFIG_MAP, "c", "ns") == MADE
    assert [each.status for each in asked] == [0, 200]


def test_invalid_watch_line_raises(script: Script) -> None:
    cluster, _, _ = script(Answer(body="<html>a proxy's greeting</html>\n"))
    with pytest.raises(ApiError, match="invalid line"):
        list(cluster.watch(CONFIG_MAP, resource_version="1"))


def test_refused_connection_is_not_ambiguous(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    cluster = connect(kubeconfig(tmp_path, url), limits=ClientLimits(retry_timeout_s=0.3))
    with pytest.raises(ApiError, match="NewConnectionError") as caught:
        cluster.create(CONFIG_MAP, MINE)
    assert not caught.value.is_ambiguous
    cluster.close()


def test_missing_configuration_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NoClusterError, match="KUBECONFIG"):
        connect()


@pytest.mark.parametrize("text", ["", "a: [", "[1, 2]", "{}", '{"current-context": "x"}'])
def test_invalid_kubeconfig_raises_with_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(NoClusterError, match=r"kubeconfig .*"):
        connect(path)


def test_kubeconfig_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "http://127.0.0.1:1234")))
    cluster = connect()
    assert cluster.host == "http://127.0.0.1:1234"
    cluster.close()
