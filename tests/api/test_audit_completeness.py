"""Each accepted change has exactly one audit entry: a run over all routes that can change something."""

from __future__ import annotations

import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http.dependencies import Service
from api.identity.authorization import list_route_rules
from api.openapi import load_examples
from scheduler.package_version import get_package_version
from scheduler.store.sql_webhooks import DELIVERIES
from tests.api.conftest import JOB, ApiService
from tests.api.seeded_service import SeededService

ROUTE_RULES = list_route_rules(ApiService().app.routes)
REPORTS = {
    "POST /v1/machines/{machine}/report",
    "POST /v1/jobs/{job_id}/agents/{node}",
    "POST /v1/jobs/{job_id}/progress",
    "PUT /v1/machines/{machine}/logs/{job_id}/{generation}/{rank}",
}
"""Reports of workers and agents, which are not audited."""
SIGN_IN = {"POST /sign-in", "POST /sign-out", "POST /v1/login-codes"}
"""Routes that need authentication, which this service has switched off. test_sign_in.py counts their entries."""
ROUTES = sorted(
    route
    for route, rule in ROUTE_RULES.items()
    if not route.startswith(("GET ", "HEAD ")) and rule.changes_state and route not in REPORTS | SIGN_IN
)
UNAUDITED_TABLES = {"audit_log", "sqlite_sequence"}
RUNS, RUNS_FULL = 4, 40
_ORDER = {"accounts/": 1, "resume": 1, "leave": 2, "DELETE": 3}


class AuditedRun:
    """Requests to all mutating routes, in an order and with bodies that the seed draws."""

    def __init__(self, seeded: SeededService, seed: int) -> None:
        seeded.reset()
        self.random = random.Random(seed)
        self.seeded = seeded
        self.changed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._prepare()

    def _prepare(self) -> None:
        """Make the machine temporary, so that it can leave, and the delivery dead, so that it can be sent again."""
        service = self.seeded.service.app.state.service
        assert isinstance(service, Service)
        machine = service.store.machines.get_machine("m0")
        assert machine is not None
        service.store.machines.update_machine(replace(machine, is_temporary=True))
        connection = sqlite3.connect(self.seeded.path)
        connection.execute(f"UPDATE {DELIVERIES.name} SET state = 'dead', ended_at_s = 1")
        connection.commit()
        connection.close()

    def send(self, route: str) -> None:
        """Send a request, and compare the changes of the store with those of the audit log."""
        before, entries_before = self._read_state()
        answer = self._request(route)
        after, entries_after = self._read_state()
        entries, has_changed = entries_after - entries_before, before != after
        if answer.is_success:
            self.changed[route] += has_changed
            if (has_changed and entries != 1) or (not has_changed and entries > 1):
                self.wrong.append(f"{route}: {answer.status_code}, changed: {has_changed}, entries: {entries}")

    def _read_state(self) -> tuple[str, int]:
        """Return a digest of everything that is stored besides the audit log, and the number of its entries."""
        digest = sha256()
        with sqlite3.connect(self.seeded.path) as connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in sorted(set(tables) - UNAUDITED_TABLES):
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info('{table}')")]
                kept = ", ".join(name for name in columns if name not in ("last_used_at_s", "seen_at_s"))
                for row in connection.execute(f"SELECT {kept} FROM '{table}' ORDER BY 1"):
                    digest.update(repr((table, row)).encode())
            (entries,) = connection.execute("SELECT count(*) FROM audit_log").fetchone()
        connection.close()
        archives = self.seeded.service.app.state.service.settings.archive_path
        digest.update(repr(sorted(path.name for path in archives.glob("*"))).encode())
        return digest.hexdigest(), entries

    def _request(self, route: str) -> httpx.Response:
        method, template = route.split(" ", 1)
        body = self._choose_body(route)
        path = template
        for name in re.findall(r"{(\w+)}", template):
            path = path.replace(f"{{{name}}}", self._choose_name(route, name, body))
        headers = dict(self.seeded.headers(self._operation(method, template)))
        if self.random.random() < 0.3:
            headers["Idempotency-Key"] = f"key-{self.random.randrange(4)}"
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.seeded.service.http.request(method, path, headers=headers, **content)

    def _operation(self, method: str, template: str) -> str:
        operation: dict[str, Any] = self.seeded.service.app.openapi()["paths"][template][method.lower()]
        return str(operation["operationId"])

    def _choose_name(self, route: str, name: str, body: object) -> str:
        if name == "digest":
            assert isinstance(body, bytes)
            return f"sha256:{sha256(body).hexdigest()}"
        names = {"machines": ["m0"], "pools": ["inference", "empty"], "nodes": ["spare", "t0"], "queues": ["blue"]}
        names["accounts"] = ["robot"]
        kind = route.split("/")[2]
        if route == "DELETE /v1/pools/{name}":
            return "empty"  # the other pool has nodes
        if route.endswith("/demand-source"):
            return "inference"
        if route == "PUT /v1/pools/{name}/serving":
            return "empty"  # a pool with a demand source serves no models
        if route == "PATCH /v1/nodes/{name}":
            return "i0"  # nodes of training pools are never lent
        if route == "DELETE /v1/machines/{name}":
            return self._choose_joined_machine()  # the other one may have left before
        running, asleep, *_ = self.seeded.known["job_id"]
        by_verb = {"suspend": asleep, "resume": asleep, "checkpoint": running}
        if (verb := route.rpartition(":")[2]) in by_verb:
            return str(by_verb[verb])
        return str(self.random.choice(names[kind] if name == "name" else self.seeded.known[name]))

    def _choose_joined_machine(self) -> str:
        service = self.seeded.service.app.state.service
        assert isinstance(service, Service)
        names = [machine.name for machine in service.store.machines.list_machines()]
        return next((name for name in names if name.startswith("joined-")), "m0")

    def _choose_body(self, route: str) -> object:
        number = self.random.randrange(6)
        bodies: dict[str, object] = {
            "POST /v1/jobs": {**JOB, "steps": 10, "name": f"job-{number}"},
            "PATCH /v1/jobs/{job_id}": {"priority": number},
            "POST /v1/pools": {"name": f"pool-{number}", "kind": "training"},
            "PATCH /v1/pools/{name}": {"lending": {"headroom": number / 10}},
            "POST /v1/pools/{name}/demand": {"gpus": number % 2},
            "POST /v1/loans/{loan_id}:veto": {"reason": f"reason {number}"},
            "PUT /v1/pools/{name}/demand-source": {"queries": [{"promql": f"gpus > {number}"}]},
            "POST /v1/nodes": {"name": f"node-{number}", "pool": "training", "gpu": "cpu", "gpus": 1},
            "PATCH /v1/nodes/{name}": {"lendable": number % 2 == 0},
            "POST /v1/queues": {"name": f"queue-{number}"},
            "PATCH /v1/queues/{name}": {"weight": number + 1.0},
            "POST /v1/webhooks": {"url": f"https://hooks.example.com/{number}"},
            "PATCH /v1/webhooks/{webhook_id}": {"enabled": number % 2 == 0, "subject": f"job-{number}"},
            "POST /v1/tokens": {"name": f"bot-{number}", "grants": ["viewer"]},
            "POST /v1/accounts": {"name": "robot", "grants": ["viewer"]},
            "PATCH /v1/accounts/{name}": {"enabled": number % 2 == 0, "expires_in_s": 1000 + number},
            "POST /v1/accounts/{name}:rotate": {"overlap_s": number},
            "POST /v1/machines/tokens": {"pool": "training"},
            "POST /v1/simulations": load_examples()["SimulationDocument"],
            "POST /v1/simulations:replay": {"days": 1.0, "policies": ["fifo"]},
            "PUT /v1/queues/{name}/secrets/{secret_name}": f"value {number}".encode(),
            "PUT /v1/archives/{digest}": f"archive {number}".encode(),
            "PUT /v1/pools/{name}/network": {"bandwidth_bytes_per_s": 1e9 * (number + 1), "latency_s": 1e-5},
        }
        served = load_examples()["ServingChange"]["serving"][0]
        bodies["PUT /v1/pools/{name}/serving"] = {"serving": [{**served, "tensorDegree": 2 ** (number % 3)}]}
        profile = {**load_examples()["GpuProfileDocument"], "efficiency": 0.5 + number / 100}
        bodies["PUT /v1/hardware/gpus/{gpu}"] = profile
        machine = {"version": get_package_version(), "clock_s": self.seeded.service.clock.now_s()}
        examples = load_examples()
        bodies["POST /v1/machines:join"] = {**examples["JoinDocument"], **machine, "name": f"joined-{number}"}
        facts = {**examples["MachineFactsDocument"], **machine, "address": f"10.0.0.{number + 1}"}
        bodies["PUT /v1/machines/{name}/facts"] = facts
        return bodies.get(route)


def _order_of(route: str) -> tuple[int, int]:
    """Return the rank of a route. What belongs to a resource is deleted before the resource."""
    rank = max((rank for word, rank in _ORDER.items() if word in route), default=0)
    return rank, -route.count("/") if route.startswith("DELETE") else 0


@pytest.fixture
def seeded(tmp_path: Path) -> Iterator[SeededService]:
    made = SeededService(tmp_path)
    yield made
    made.service.http.close()


@pytest.mark.parametrize("runs", [RUNS, pytest.param(RUNS_FULL, marks=pytest.mark.full)])
def test_each_accepted_change_has_exactly_one_entry(seeded: SeededService, runs: int) -> None:
    changed = Counter[str]()
    for seed in range(runs):
        run = AuditedRun(seeded, seed)
        # Each route once, those that need or end what others use last, then any of them.
        once = sorted(run.random.sample(ROUTES, len(ROUTES)), key=_order_of)
        for route in [*once, *run.random.choices(ROUTES, k=2 * len(ROUTES))]:
            run.send(route)
        assert not run.wrong, f"seed {seed}: {run.wrong}"
        changed += run.changed
    missed = [route for route in ROUTES if not changed[route]]
    assert not missed, "no request changed anything; give the route a body in _choose_body"
