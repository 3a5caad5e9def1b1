"""Fixtures of the API tests: the real application on a MemoryStore, called in process without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from api.app import create_app
from api.demo import DemoDay
from scheduler.domain.commands import Command, ForecastMade
from scheduler.domain.fleet import Forecast
from scheduler.domain.tick_report import TickReport
from scheduler.executors.executor import RecordingExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.store.api_protocol import ApiStore
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Lease
from tests.api.response_validation import validate_response
from tests.memory_run_log import MemoryRunLog

NOW_S = 1_760_000_000.0
Problem = Callable[[httpx.Response, int], dict[str, Any]]
JOB: dict[str, Any] = {"name": "train", "gpus": {"min": 1, "max": 2}, "command": ["python", "train.py"]}
"""The smallest job document that can run."""
SECRET = b"a secret that only tests know...."


class AppTransport(httpx.BaseTransport):
    """Lets a synchronous client call an ASGI application directly."""

    def __init__(self, app: ASGIApp) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        forwarded = httpx.Request(request.method, request.url, headers=request.headers, content=body)
        answer = await self._transport.handle_async_request(forwarded)
        headers = [header for header in answer.headers.multi_items() if header[0] != "content-encoding"]
        response = httpx.Response(answer.status_code, headers=headers, content=await answer.aread())  # decoded
        if response.content and response.headers.get("content-type") == "application/json":
            validate_response(request.method, request.url.path, response.status_code, response.json())
        return response


class ApiService:
    """The application with its store and a manual clock, so that a test can run ticks and inspect the inbox."""

    def __init__(
        self, settings: Settings | None = None, store: ApiStore | None = None, *, demo: DemoDay | None = None
    ) -> None:
        self.store: ApiStore = store or MemoryStore()
        self.run_log = MemoryRunLog()
        self.clock = ManualClock(NOW_S)
        self.policies = load_policy_set("ebbtide")
        self.executor = RecordingExecutor()
        self.leader: Lease | None = None
        self.app = create_app(
            self.store,
            settings or Settings(auth="off", allowed_hosts="service"),
            clock=self.clock,
            policies=self.policies,
            lease=lambda: self.leader,
            token_secret=SECRET,
            run_log=self.run_log,
            demo=demo,
        )
        self.transport = AppTransport(self.app)
        self.http = httpx.Client(transport=self.transport, base_url="http://service")

    def tick(self, *, after_s: float = 1.0, learned: tuple[Command, ...] = ()) -> TickReport:
        """Run a real tick `after_s` later, with an executor that completes everything at once."""
        self.clock.move_to(self.clock.now_s() + after_s)
        self.leader = self.store.acquire_lease("test", now_s=self.clock.now_s(), ttl_s=15.0)
        assert self.leader is not None
        return tick(
            self.store, self.executor, self.clock, self.policies, epoch=self.leader.epoch, planning_inputs=learned
        )

    def lend_all(self) -> None:
        """Lend both idle inference nodes to a job that can use them."""
        self.submit(gpus={"min": 4, "max": 4})
        self.made("/v1/pools/inference/demand", {"gpus": 0})
        forecast = Forecast(self.clock.now_s(), 600.0, (0.5, 0.999), (0.0, 0.0), "test")
        self.tick(learned=(Command("forecast", self.clock.now_s(), ForecastMade("inference", forecast)),))
        self.tick()
        self.tick()
        assert {loan["state"] for loan in self.get("/v1/loans")["items"]} == {"active"}

    def post(self, path: str, document: object = None, *, token: str = "") -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self.http.post(path, json=document, headers=headers)

    def get(self, path: str, **query: str | int | float) -> dict[str, Any]:
        answer = self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def made(self, path: str, document: object = None) -> dict[str, Any]:
        answer = self.post(path, document)
        assert answer.status_code in (200, 201, 202), answer.text
        made: dict[str, Any] = answer.json()
        return made

    def create_queues(self, *names: str) -> None:
        for name in names:
            self.made("/v1/queues", {"name": name})

    def submit(self, name: str = "train", **fields: object) -> str:
        """Submit a job of 1 to 2 GPUs without a model, unless `fields` say otherwise, and return its id."""
        return str(
            self.made("/v1/jobs", {**JOB, "name": name, "steps": 1000, "onResize": "checkpoint", **fields})["id"]
        )

    def refused(self, method: str, path: str, document: object = None, *, token: str = "") -> dict[str, Any]:
        """Send an invalid request and return its 422 problem, after checking that nothing was added to the inbox."""
        waiting = self.store.count_pending_commands()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        problem = problem_of(self.http.request(method, path, json=document, headers=headers), 422)
        assert self.store.count_pending_commands() == waiting
        assert problem["errors"], problem
        return problem


def problem_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Check the form of a problem response and return it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    assert problem["type"].startswith("urn:ebbtide:problem:")
    assert problem["title"]
    assert problem["detail"]
    return problem


@pytest.fixture
def service() -> Iterator[ApiService]:
    made = ApiService()
    with made.http:
        yield made


@pytest.fixture
def fleet(service: ApiService) -> ApiService:
    """A service with a training node of 2 GPUs and two inference nodes of 1 GPU."""
    service.made("/v1/pools", {"name": "training", "kind": "training"})
    service.made("/v1/pools", {"name": "inference", "kind": "inference", "lending": {"headroom": 0.0}})
    service.made("/v1/nodes", {"name": "t0", "pool": "training", "gpu": "cpu", "gpus": 2})
    service.made("/v1/nodes", {"name": "i0", "pool": "inference", "gpu": "cpu", "gpus": 1})
    service.made("/v1/nodes", {"name": "i1", "pool": "inference", "gpu": "cpu", "gpus": 1})
    return service


@pytest.fixture
def problem() -> Problem:
    return problem_of
