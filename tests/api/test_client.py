"""The client alone: what it sends, what it retries, and how it reports problems and failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ebbtide.client import Client, ProblemError, RetryPolicy, UnreachableError

Handler = Callable[[httpx.Request], httpx.Response]


class Recorder:
    """Answers with each of `answers` in turn, repeating the last one, and records the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def lines(self) -> list[str]:
        return [f"{r.method} {r.url.raw_path.decode()}" for r in self.requests]


def client_of(handler: Handler, pauses: list[float] | None = None, attempts: int = 3) -> Client:
    sleep = (pauses if pauses is not None else []).append
    return Client(
        "http://ebbtide.test",
        transport=httpx.MockTransport(handler),
        retries=RetryPolicy(attempts=attempts, delay_s=0.5, sleep=sleep),
    )


def page(*items: dict[str, Any], following: str | None = None) -> httpx.Response:
    return httpx.Response(200, json={"items": list(items), "next": following})


REQUESTS: list[tuple[str, Callable[[Client], object], object]] = [
    ("POST /v1/jobs", lambda c: c.submit({"name": "a"}), {"name": "a"}),
    ("POST /v1/jobs:dry-run", lambda c: c.dry_run({"name": "a"}), {"name": "a"}),
    ("GET /v1/jobs?limit=100", lambda c: list(c.jobs()), None),
    ("GET /v1/jobs?state=running&name=a&limit=7", lambda c: list(c.jobs(state="running", name="a", limit=7)), None),
    ("GET /v1/usage?by=queue", lambda c: c.usage(), None),
    (
        "GET /v1/usage?from=2026-11-01&to=9&by=day%2Cowner",
        lambda c: c.usage(since="2026-11-01", until="9", by=["day", "owner"]),
        None,
    ),
    ("GET /v1/jobs/a%2Fb", lambda c: c.job("a/b"), None),
    ("PATCH /v1/jobs/a", lambda c: c.scale("a", max_gpus=4), {"gpus": {"max": 4}}),
    ("PATCH /v1/jobs/a", lambda c: c.scale("a", min_gpus=2, max_gpus=4), {"gpus": {"min": 2, "max": 4}}),
    ("DELETE /v1/jobs/a", lambda c: c.cancel("a"), None),
    ("POST /v1/jobs/a:suspend", lambda c: c.suspend("a"), None),
    ("POST /v1/jobs/a:resume", lambda c: c.resume("a"), None),
    ("GET /v1/jobs/a/plan", lambda c: c.job_plan("a"), None),
    ("GET /v1/jobs/a/explanation", lambda c: c.explanation("a"), None),
    ("GET /v1/jobs/a/events?limit=100", lambda c: list(c.job_events("a")), None),
    ("GET /v1/jobs/a/history", lambda c: c.history("a"), None),
    ("GET /v1/jobs/a/progress", lambda c: c.progress("a"), None),
    ("GET /v1/pools", lambda c: c.pools(), None),
    ("GET /v1/pools/p", lambda c: c.pool("p"), None),
    ("POST /v1/pools", lambda c: c.create_pool({"name": "p"}), {"name": "p"}),
    ("PATCH /v1/pools/p", lambda c: c.change_pool("p", {"lending": {}}), {"lending": {}}),
    ("DELETE /v1/pools/p", lambda c: c.delete_pool("p"), None),
    ("GET /v1/nodes?pool=p", lambda c: c.nodes(pool="p"), None),
    ("GET /v1/nodes/n", lambda c: c.node("n"), None),
    ("POST /v1/nodes", lambda c: c.add_node({"name": "n"}), {"name": "n"}),
    ("DELETE /v1/nodes/n", lambda c: c.delete_node("n"), None),
    ("PATCH /v1/nodes/n", lambda c: c.change_node("n", lendable=False), {"lendable": False}),
    ("POST /v1/nodes/n:cordon", lambda c: c.cordon("n"), None),
    ("POST /v1/nodes/n:drain", lambda c: c.drain("n"), None),
    ("POST /v1/nodes/n:uncordon", lambda c: c.uncordon("n"), None),
    ("GET /v1/pools/p/demand", lambda c: c.demand("p"), None),
    ("POST /v1/pools/p/demand", lambda c: c.report_demand("p", gpus=2.5), {"gpus": 2.5}),
    ("POST /v1/pools/p/demand", lambda c: c.report_demand("p", gpus=2, at_s=9.5), {"gpus": 2, "at": 9.5}),
    (
        "POST /v1/pools/p/demand",
        lambda c: c.report_requests("p", [{"model": "m", "rate": 2.5}]),
        {"requests": [{"model": "m", "rate": 2.5}]},
    ),
    (
        "POST /v1/pools/p/demand",
        lambda c: c.report_requests("p", [{"model": "m", "rate": 2}], at_s=9.5),
        {"requests": [{"model": "m", "rate": 2}], "at": 9.5},
    ),
    ("GET /v1/pools/p/serving", lambda c: c.served_models("p"), None),
    ("PUT /v1/pools/p/serving", lambda c: c.set_served_models("p", []), {"serving": []}),
    ("GET /v1/pools/p/forecast", lambda c: c.forecast("p"), None),
    ("GET /v1/queues", lambda c: c.queues(), None),
    ("GET /v1/queues/q", lambda c: c.queue("q"), None),
    ("POST /v1/queues", lambda c: c.create_queue({"name": "q"}), {"name": "q"}),
    ("PATCH /v1/queues/q", lambda c: c.change_queue("q", {"limit_gpus": None}), {"limit_gpus": None}),
    ("DELETE /v1/queues/q", lambda c: c.delete_queue("q"), None),
    ("GET /v1/loans", lambda c: c.loans(), None),
    ("POST /v1/lending:pause", lambda c: c.pause_lending(), None),
    ("POST /v1/lending:resume", lambda c: c.resume_lending(), None),
    ("POST /v1/lending:recall-all", lambda c: c.recall_all(), None),
    ("GET /v1/events?subject=a&limit=5", lambda c: list(c.events(subject="a", limit=5)), None),
    ("GET /v1/events?after=9&limit=100", lambda c: list(c.events(after=9)), None),
    ("GET /v1/decisions?limit=100", lambda c: list(c.decisions()), None),
    (
        "GET /v1/decisions?subject=i0&kind=LendNode&limit=5",
        lambda c: list(c.decisions(subject="i0", kind="LendNode", limit=5)),
        None,
    ),
    ("GET /v1/settings", lambda c: list(c.settings()), None),
    ("GET /v1/snapshots/latest", lambda c: c.snapshot(), None),
    ("POST /v1/plans", lambda c: c.plan({"model": "gpt2"}), {"model": "gpt2"}),
]


@pytest.mark.parametrize(("line", "call", "body"), REQUESTS, ids=[f"{at}-{r[0]}" for at, r in enumerate(REQUESTS)])
def test_each_method_sends_its_request(line: str, call: Callable[[Client], object], body: object) -> None:
    recorder = Recorder(page())
    call(client_of(recorder))
    assert recorder.lines == [line]
    sent = recorder.requests[0].content
    assert (json.loads(sent) if sent else None) == body


def test_an_archive_is_checked_and_uploaded_with_retries(tmp_path: Path) -> None:
    file, sent = tmp_path / "archive", list[int]()
    file.write_bytes(bytes(600_000))
    busy = httpx.Response(503, headers={"Retry-After": "0"})
    recorder = Recorder(httpx.Response(404), busy, httpx.Response(201, json={"digest": "d", "bytes": 600_000}))
    client = client_of(recorder)
    assert not client.has_archive("sha256:ab")
    assert client.upload_archive("sha256:ab", file, on_sent=sent.append)["bytes"] == 600_000
    assert recorder.lines == ["HEAD /v1/archives/sha256:ab", *["PUT /v1/archives/sha256:ab"] * 2]
    assert [len(request.content) for request in recorder.requests[1:]] == [600_000, 600_000]
    assert sent == [262_144, 524_288, 600_000] * 2
    assert client_of(Recorder(httpx.Response(200))).has_archive("sha256:ab")
    with pytest.raises(ProblemError) as refused:
        client_of(Recorder(httpx.Response(403))).has_archive("sha256:ab")
    assert refused.value.status == 403


def test_lists_are_read_page_by_page() -> None:
    recorder = Recorder(page({"id": "a"}, {"id": "b"}, following="c7"), page({"id": "c"}))
    assert [job["id"] for job in client_of(recorder).jobs(limit=2)] == ["a", "b", "c"]
    assert recorder.lines == ["GET /v1/jobs?limit=2", "GET /v1/jobs?limit=2&cursor=c7"]


def test_lists_fetch_pages_lazily() -> None:
    recorder = Recorder(page({"id": "a"}, following="c7"))
    assert dict(next(client_of(recorder).jobs(limit=1))) == {"id": "a"}
    assert len(recorder.requests) == 1


@pytest.mark.parametrize(
    ("answer", "ready"),
    [(httpx.Response(200, json={}), True), (httpx.Response(503), False), (httpx.ConnectError("refused"), False)],
)
def test_readiness_follows_the_probe(answer: httpx.Response | Exception, ready: bool) -> None:
    recorder = Recorder(answer)
    assert client_of(recorder).is_ready() is ready
    assert recorder.lines[0] == "GET /readyz"


def test_an_empty_body_is_an_empty_object() -> None:
    assert not client_of(Recorder(httpx.Response(204))).cancel("a")


def test_a_problem_carries_all_members() -> None:
    document = {
        "type": "https://ebbtide.dev/problems/invalid",
        "title": "Unprocessable Content",
        "status": 422,
        "detail": "gpus.max: got 1, allowed is at least 2",
        "errors": [{"field": "gpus.max", "message": "at least 2"}],
    }
    with pytest.raises(ProblemError) as refused:
        client_of(Recorder(httpx.Response(422, json=document))).submit({})
    problem = refused.value
    assert (problem.status, problem.type, problem.title) == (422, document["type"], document["title"])
    assert str(problem) == problem.detail == document["detail"]
    assert [(error.field, error.message) for error in problem.errors] == [("gpus.max", "at least 2")]


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(500, text="<h1>oops</h1>"), httpx.Response(500, json=["oops"]), httpx.Response(500)],
    ids=["html", "list", "empty"],
)
def test_an_error_without_a_problem_document_has_its_status(answer: httpx.Response) -> None:
    with pytest.raises(ProblemError) as refused:
        client_of(Recorder(answer)).submit({})
    assert refused.value.status == 500
    assert str(refused.value) == "Internal Server Error"


@pytest.mark.parametrize("answer", [httpx.Response(200, text="hello"), httpx.Response(200, json=[1])])
def test_a_response_of_another_program_is_recognized(answer: httpx.Response) -> None:
    with pytest.raises(UnreachableError, match="is this an Ebbtide service"):
        client_of(Recorder(answer)).job("a")


def test_a_read_is_retried_after_a_broken_connection() -> None:
    pauses: list[float] = []
    recorder = Recorder(httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.Response(200, json={"id": "a"}))
    assert dict(client_of(recorder, pauses).job("a")) == {"id": "a"}
    assert pauses == [0.5, 1.0]


def test_retry_after_is_respected_up_to_the_maximum() -> None:
    pauses: list[float] = []
    later = [httpx.Response(429, headers={"Retry-After": after}) for after in ("3", "86400")]
    assert len(client_of(Recorder(*later, httpx.Response(200, json={})), pauses).job("a")) == 0
    assert pauses == [3.0, 10.0]


def test_delays_double_up_to_the_maximum() -> None:
    pauses: list[float] = []
    with pytest.raises(UnreachableError):
        client_of(Recorder(httpx.ConnectError("refused")), pauses, attempts=8).job("a")
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_date_in_retry_after_is_ignored() -> None:
    pauses: list[float] = []
    later = httpx.Response(503, headers={"Retry-After": "Sat, 21 Nov 2026 10:00:00 GMT"})
    client_of(Recorder(later, httpx.Response(200, json={})), pauses).cancel("a")
    assert pauses == [0.5]


def test_a_read_fails_after_the_last_attempt() -> None:
    recorder = Recorder(httpx.ConnectError("refused"))
    with pytest.raises(UnreachableError, match=r"http://ebbtide.test does not answer: refused"):
        client_of(recorder).job("a")
    assert len(recorder.requests) == 3


def test_the_last_response_counts_if_the_service_stays_busy() -> None:
    with pytest.raises(ProblemError) as refused:
        client_of(Recorder(httpx.Response(503))).job("a")
    assert refused.value.status == 503


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.dry_run({}),
        lambda c: c.scale("a", max_gpus=2),
        lambda c: c.suspend("a"),
        lambda c: c.recall_all(),
        lambda c: c.cancel("a", if_match='"read"'),  # a retry would fail because the first attempt changed the ETag
    ],
    ids=["dry-run", "scale", "suspend", "recall-all", "cancel-as-read"],
)
@pytest.mark.parametrize("answer", [httpx.ConnectError("refused"), httpx.Response(503)], ids=["broken", "busy"])
def test_changes_are_sent_once(call: Callable[[Client], object], answer: httpx.Response | Exception) -> None:
    recorder = Recorder(answer)
    with pytest.raises((UnreachableError, ProblemError)):
        call(client_of(recorder))
    assert len(recorder.requests) == 1


@pytest.mark.parametrize("answer", [httpx.ReadTimeout("no answer"), httpx.Response(503)], ids=["lost", "busy"])
def test_a_submission_is_retried_with_the_same_key(answer: httpx.Response | Exception) -> None:
    recorder = Recorder(answer, httpx.Response(201, json={"id": "a"}))
    with client_of(recorder) as client:
        assert dict(client.submit({"name": "a"})) == {"id": "a"}
        client.submit({"name": "a"})
        client.submit({"name": "a"}, key="mine")
    first, again, other, named = [request.headers["Idempotency-Key"] for request in recorder.requests]
    assert first == again != other
    assert named == "mine"


@pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:8787", "http://[::1"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        Client(url)


def test_a_client_is_closed_at_the_end_of_its_block() -> None:
    with client_of(Recorder(httpx.Response(200, json={}))) as client:
        client.snapshot()
    with pytest.raises(RuntimeError, match="closed"):
        client.snapshot()
