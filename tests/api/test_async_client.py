"""The asynchronous client: the requests of the other one, its retries, and streams of a real API process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import pytest

from ebbtide.client import AsyncClient, Client, ProblemError, RetryPolicy, UnreachableError, etag_of
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from tests.api.stream_process import StreamProcess, run_stream_process
from tests.api.test_client import REQUESTS, Handler, Recorder, page
from tests.builders import a_job

Result = TypeVar("Result")
PATIENCE_S = 60.0


def client_of(handler: Handler, attempts: int = 3) -> AsyncClient:
    retries = RetryPolicy(attempts=attempts, delay_s=0.001)
    return AsyncClient("http://ebbtide.test", transport=httpx.MockTransport(handler), retries=retries)


def run(task: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(task, PATIENCE_S))


class BlockingClient:
    """Waits for each method of an asynchronous client, so that the cases of the other client apply to it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def perform(*arguments: Any, **options: Any) -> Any:
            async with client_of(self._handler) as client:
                result = getattr(client, name)(*arguments, **options)
                return [each async for each in result] if isinstance(result, AsyncIterator) else await result

        return lambda *arguments, **options: run(perform(*arguments, **options))


def test_both_clients_have_the_same_methods_and_descriptions_of_them() -> None:
    names = {name for name in dir(Client) if not name.startswith("_")}
    assert names == {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert len(names) > 70
    described = [name for name in names if hasattr(getattr(Client, name), "describe")]
    assert names - set(described) == {"close", "is_ready"}
    assert all(getattr(Client, name) is getattr(AsyncClient, name) for name in described)


def test_each_method_sends_the_request_of_the_other_client() -> None:
    for line, call, body in REQUESTS:
        recorder = Recorder(page())
        call(cast("Client", BlockingClient(recorder)))
        sent = recorder.requests[0].content
        assert (recorder.lines, json.loads(sent) if sent else None) == ([line], body)


def test_lists_are_read_page_by_page_and_lazily() -> None:
    recorder = Recorder(page({"id": "a"}, {"id": "b"}, following="c7"), page({"id": "c"}))

    async def read() -> tuple[str, int, list[str]]:
        jobs = client_of(recorder).jobs(limit=2)
        first = (await anext(jobs))["id"]
        return first, len(recorder.requests), [job["id"] async for job in jobs]

    assert run(read()) == ("a", 1, ["b", "c"])
    assert recorder.lines == ["GET /v1/jobs?limit=2", "GET /v1/jobs?limit=2&cursor=c7"]


def test_reads_are_retried_and_changes_are_sent_once() -> None:
    refused = httpx.ConnectError("refused")
    recorder = Recorder(refused, httpx.Response(503), httpx.Response(200, json={"id": "a"}, headers={"ETag": '"7"'}))
    job = run(client_of(recorder).job("a"))
    assert (dict(job), etag_of(job), len(recorder.requests)) == ({"id": "a"}, '"7"', 3)
    with pytest.raises(ProblemError) as problem:
        run(client_of(recorder := Recorder(httpx.Response(503))).suspend("a"))
    assert (problem.value.status, len(recorder.requests)) == (503, 1)
    with pytest.raises(UnreachableError, match=r"http://ebbtide.test does not answer: refused"):
        run(client_of(recorder := Recorder(refused)).job("a"))
    assert len(recorder.requests) == 3
    assert run(client_of(Recorder(httpx.Response(503))).is_ready()) is False


def test_a_submission_is_retried_with_the_same_key() -> None:
    recorder = Recorder(httpx.ReadTimeout("no answer"), httpx.Response(201, json={"id": "a"}))
    run(client_of(recorder).submit({"name": "a"}))
    first, again = [request.headers["Idempotency-Key"] for request in recorder.requests]
    assert first == again


def test_an_archive_is_uploaded_with_retries(tmp_path: Path) -> None:
    file, sent, received, attempts = tmp_path / "archive", list[int](), list[int](), count()
    file.write_bytes(bytes(600_000))

    async def answer(request: httpx.Request) -> httpx.Response:
        received.append(len(await request.aread()))
        return httpx.Response(201, json={"bytes": 600_000}) if next(attempts) else httpx.Response(503)

    client = client_of(cast("Handler", answer))
    assert run(client.upload_archive("sha256:ab", file, on_sent=sent.append))["bytes"] == 600_000
    assert (received, sent) == ([600_000] * 2, [262_144, 524_288, 600_000] * 2)
    assert run(client_of(Recorder(httpx.Response(404))).has_archive("sha256:ab")) is False


def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(ValueError, match="url"):
        AsyncClient("127.0.0.1:8787")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamProcess]:
    with run_stream_process(tmp_path_factory.mktemp("async")) as made:
        made.commit(Snapshot(jobs={"train": a_job("train", 1, 1, state=JobState.RUNNING)}), "train")
        yield made


@pytest.mark.e2e
def test_jobs_of_a_real_service_are_read_and_changed_concurrently(service: StreamProcess) -> None:
    document = {"name": "more", "gpus": {"min": 1, "max": 1}, "command": ["true"]}

    async def use() -> None:
        async with AsyncClient(f"http://127.0.0.1:{service.port}") as client:
            job, again, overview = await asyncio.gather(client.job("train"), client.job("train"), client.overview())
            assert job == again
            assert overview["generation"] >= 1
            submitted = await client.submit(document)
            assert submitted["name"] == "more"
            assert [each["id"] async for each in client.jobs(name="train")] == ["train"]
            with pytest.raises(ProblemError) as refused:
                await client.job("nobody")
            assert refused.value.status == 404
            assert await client.pools() == []

    run(use())


@pytest.mark.e2e
def test_events_of_a_real_service_are_followed_across_a_restart(service: StreamProcess) -> None:
    async def follow() -> list[str]:
        async with AsyncClient(f"http://127.0.0.1:{service.port}") as client:
            events = client.follow_events(after=service.store.get_last_event_number())
            service.commit(None, "a")
            found = [(await anext(events))["subject"]]
            await asyncio.to_thread(service.stop)
            service.commit(None, "b")
            restarted = asyncio.create_task(asyncio.to_thread(service.start))
            found.append((await anext(events))["subject"])
            await restarted
            with pytest.raises(ProblemError, match="nobody"):
                await anext(client.follow_events(job_id="nobody"))
            return found

    assert run(follow()) == ["a", "b"]
