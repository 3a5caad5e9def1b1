"""Demand from a real and a failing Prometheus: stale demand stops new loans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from scheduler.kubernetes.api_objects import POOL
from tests.contract.prometheus_site import PROGRAM, Prometheus, Target
from tests.http_server import LoopbackServer, QuietHandler
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no prometheus on the path (Debian's package prometheus)")

STALE_S = 15.0


@pytest.fixture
def target() -> Iterator[Target]:
    created = Target()
    created.text = 'inference_gpus 0\nserved_gpus{model="a"} 1\nserved_gpus{model="b"} 2\n'
    yield created
    created.close()


@pytest.fixture
def prometheus(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prometheus]:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    created = Prometheus(folder, target.address)
    monkeypatch.setenv("EBBTIDE_PROMETHEUS_URL", created.url)
    try:
        created.start()
        yield created
    finally:
        created.kill()


def add_pool(
    operated: Operated, name: str, query: str, *, nodes: int = 0, lending: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Add a Pool with this number of nodes, whose demand is the result of `query`."""
    labels = {"ebbtide.dev/test-pool": name}
    for number in range(nodes):
        operated.kubelet.add_node(f"{operated.namespace}-{name}{number}", gpus=8, labels=labels)
    spec: dict[str, Any] = {
        "kind": "inference",
        "nodeSelector": labels,
        "gpu": "h100-80g",
        "lending": {"headroom": 0, "returnDeadline": "30s", "coldStart": "0s", **lending},
        "demand": {"source": "prometheus", "query": query, "staleAfter": f"{STALE_S:.0f}s"},
    }
    operated.cluster.apply(POOL, {"metadata": {"name": name}, "spec": spec})


def told(operated: Operated, pool: str) -> tuple[str, str]:
    """Return reason and message of the condition DemandKnown."""
    found = operated.cluster.get(POOL, pool).get("status", {}).get("conditions", [])
    return next(((each["reason"], each["message"]) for each in found if each["type"] == "DemandKnown"), ("", ""))


def test_stale_demand_stops_new_loans_and_keeps_existing_ones(operated: Operated, prometheus: Prometheus) -> None:
    operated.add_nodes(1)
    lending = {"demandProfile": [0] * 24}  # lends before the forecast is calibrated
    add_pool(operated, "serving", "inference_gpus", nodes=4, lending=lending)
    operated.start_operator()
    eventually(lambda: told(operated, "serving")[0] == "Read", what="its demand is known")
    operated.submit("llama", 8, 16)
    eventually(lambda: operated.held("llama") == 16, what="it has grown onto a lent node")
    prometheus.kill()
    eventually(lambda: told(operated, "serving")[0] == "Unreachable", what="the Pool says so")
    eventually(lambda: _age_s(operated) > STALE_S, what="the last reading is stale")
    before = sorted(operated.lent_nodes())
    operated.submit("second", 24, 24)
    eventually(lambda: operated.phase("second") == "Queued", what="it waits")
    time.sleep(3 * 2.0)  # passes that could lend
    assert (sorted(operated.lent_nodes()), operated.phase("second")) == (before, "Queued")
    assert operated.held("llama") == 16
    prometheus.start()
    eventually(lambda: operated.phase("second") == "Running", what="lending goes on")
    eventually(lambda: told(operated, "serving") == ("Read", ""), what="the Pool says that it is read again")


def _age_s(operated: Operated) -> float:
    return time.time() - operated.store.load().snapshot.demand["serving"].at_s


def test_invalid_query_results_are_reported_per_pool(operated: Operated, prometheus: Prometheus) -> None:
    queries = {
        "none": ("no_such_gpus", "NoSeries", "no series"),
        "many": ("served_gpus", "ManySeries", "2 series"),
        "nan": ("scalar(no_such_gpus)", "NotANumber", "nan"),
        "negative": ("-sum(served_gpus)", "NotANumber", "-3"),
        "broken": ("sum(", "BadQuery", "parse error"),
    }
    operated.add_nodes(1)
    for name, (query, _, _) in queries.items():
        add_pool(operated, name, query, nodes=1)
    operator = operated.start_operator()
    operated.submit("llama", 8, 32)
    for name, (_, reason, words) in queries.items():
        eventually(partial(_says, operated, name, reason, words), what=f"{name} is {reason}: {words}")
    operated.until_phase("llama", "Running")
    assert (operated.held("llama"), operated.lent_nodes()) == (8, [])
    assert operator.poll() is None


def _says(operated: Operated, pool: str, reason: str, words: str) -> bool:
    """Check all at once, because a late scrape changes the reason for a moment."""
    status = operated.cluster.get(POOL, pool).get("status", {})
    conditions = [each for each in status.get("conditions", []) if each["type"] == "DemandKnown"]
    return status.get("problem") == reason and [(each["reason"], words in each["message"]) for each in conditions] == [
        (reason, True)
    ]


class Failing(QuietHandler, BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(500)


def test_failing_prometheus_is_reported_and_stops_loans(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackServer(Failing) as server:
        monkeypatch.setenv("EBBTIDE_PROMETHEUS_URL", server.url)
        operated.add_nodes(1)
        add_pool(operated, "serving", "inference_gpus", nodes=1)
        operated.start_operator()
        operated.submit("llama", 8, 16)
        eventually(lambda: told(operated, "serving")[0] == "Unreachable", what="the Pool says so")
        assert "HTTP status 500" in told(operated, "serving")[1]
        operated.until_phase("llama", "Running")
        assert (operated.held("llama"), operated.lent_nodes()) == (8, [])
