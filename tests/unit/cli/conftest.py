"""Fixtures that run the command line, alone or against the real API in this process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from starlette.types import ASGIApp
from typer.testing import CliRunner, Result

from api.app import create_app
from api.console_assets import CHART_FILES
from ebbtide.client import Client
from scheduler.domain.commands import Command
from scheduler.domain.tick_report import TickReport
from scheduler.executors.executor import RecordingExecutor
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.store.api_protocol import ApiStore
from scheduler.store.memory_store import MemoryStore
from tests.memory_run_log import MemoryRunLog

Run = Callable[..., Result]
needs_charts = pytest.mark.skipif(
    not all(path.is_file() for path in CHART_FILES.values()), reason="no node_modules: run `npm ci` in api/console"
)
START_S = 1_790_000_000.0


class Page(HTMLParser):
    """A report page: the addresses that it loads, and its texts. All its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self._open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class InProcessService:
    """A service in this process. Its controller ticks on demand, and workers start immediately."""

    def __init__(self, store: ApiStore | None = None, **settings: Any) -> None:
        self.store: ApiStore = store or MemoryStore()
        self.executor = RecordingExecutor()
        self.clock = ManualClock(START_S)
        self.policies = load_policy_set("ebbtide")
        self.lease = self.store.acquire_lease("tests", now_s=START_S, ttl_s=1e9)
        self.app = create_app(
            self.store,
            Settings(auth="off", allowed_hosts="ebbtide.test", **settings),
            clock=self.clock,
            policies=self.policies,
            lease=lambda: self.lease,
            token_secret=b"0" * 32,
            run_log=MemoryRunLog(),
        )

    def client(self) -> Client:
        return Client("http://ebbtide.test", transport=AppTransport(self.app))

    def tick(self, after_s: float = 1.0, *, learned: tuple[Command, ...] = ()) -> TickReport:
        assert self.lease is not None
        self.clock.move_to(self.clock.now_s() + after_s)
        epoch = self.lease.epoch
        return tick(self.store, self.executor, self.clock, self.policies, epoch=epoch, planning_inputs=learned)


class AppTransport(httpx.BaseTransport):
    """Calls the application directly, without a socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return asyncio.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
        answer = await self._transport.handle_async_request(asked)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command line: `run("ps", "-o", "json")`. No service listens on the URL."""
    from cli.app import app

    def invoke(*words: str, stdin: str | None = None, **more: str | None) -> Result:
        own = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
        environment = {"EBBTIDE_URL": "http://127.0.0.1:1", "COLUMNS": "100", **own}
        with patch.dict(os.environ):  # some commands set variables for their processes
            return CliRunner().invoke(app, list(words), input=stdin, env={**environment, **more}, prog_name="ebbtide")

    return invoke


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InProcessService:
    """A service that every command of the test talks to."""
    service = InProcessService(archive_dir=tmp_path / "archives")
    monkeypatch.setattr("ebbtide.client.Client", partial(Client, transport=AppTransport(service.app)))
    return service


@pytest.fixture
def ask(run: Run, service: InProcessService) -> Callable[..., Any]:
    """Run a command that must succeed and return the JSON it prints."""

    def ask(*words: str) -> Any:
        result = run(*words, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return ask


@pytest.fixture
def fleet(service: InProcessService) -> InProcessService:
    """A service with four training GPUs and two inference nodes with one GPU each."""
    with service.client() as client:
        client.create_pool({"name": "training", "kind": "training"})
        client.create_pool({"name": "serving", "kind": "inference"})
        for name, pool, gpus in (("t0", "training", 4), ("i0", "serving", 1), ("i1", "serving", 1)):
            client.add_node({"name": name, "pool": pool, "gpu": "a100-80g", "gpus": gpus})
    service.tick()
    return service
