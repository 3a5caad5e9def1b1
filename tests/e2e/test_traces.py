"""Traces of a real service, sent to a real OTLP receiver over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ebbtide.client import Client
from scheduler.telemetry.traces import get_job_span_context
from tests.http_server import LoopbackServer, QuietHandler
from tests.kubernetes.waiting import eventually

wire = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytestmark = pytest.mark.e2e


class Receiver:
    """Keeps every span it receives, with the name of its service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        receiver = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for sent in wire.ExportTraceServiceRequest.FromString(body).resource_spans:
                    resource = {each.key: each.value.string_value for each in sent.resource.attributes}
                    spans = (span for scope in sent.scope_spans for span in scope.spans)
                    receiver.spans.extend((resource["service.name"], span) for span in spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        server = LoopbackServer(Handler)
        self.url, self.close = server.url, server.close

    def named(self, service: str, name: str) -> list[Any]:
        return [span for of, span in tuple(self.spans) if (of, span.name) == (service, name)]


@pytest.mark.full
def test_spans_of_ticks_jobs_and_requests_reach_the_receiver(tmp_path: Path) -> None:
    receiver = Receiver()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "EBBTIDE_DATABASE_URL": f"sqlite:///{tmp_path}/ebbtide.sqlite",
        "EBBTIDE_RUN_DIR": f"{tmp_path}/run",
        "EBBTIDE_PORT": str(port),
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    command = [sys.executable, "-m", "cli", "serve", "--no-auth", "--force"]
    with (tmp_path / "service.log").open("wb") as log:
        service = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            eventually(client.is_ready, what="the service is up")
            client.create_pool({"name": "training", "kind": "training"})
            job = client.submit({"name": "waits", "gpus": {"min": 1, "max": 1}, "steps": 10, "command": ["true"]})
        own = eventually(lambda: receiver.named("ebbtide-controller", "JobState"), what="a span of the job")
        assert own[0].trace_id == get_job_span_context(job["id"]).trace_id.to_bytes(16)
        (tick_id,) = {link.span_id for link in own[0].links}
        ticks = eventually(
            lambda: [span for span in receiver.named("ebbtide-controller", "tick") if span.span_id == tick_id],
            what="a span of its tick",
        )
        assert own[0].span_id in {link.span_id for link in ticks[0].links}
        inside = {span.name for _, span in receiver.spans if span.parent_span_id == tick_id}
        assert {"observe", "load", "decide", "commit", "converge"} <= inside
        eventually(lambda: receiver.named("ebbtide-api", "POST /v1/jobs"), what="a span of the request")
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0, (tmp_path / "service.log").read_text()
        receiver.close()


def test_unknown_exporter_is_rejected(tmp_path: Path) -> None:
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "zipkin", "EBBTIDE_DATABASE_URL": f"sqlite:///{tmp_path}/e"}
    command = [sys.executable, "-m", "cli", "serve", "--no-auth", "--force"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 2
    assert "OTEL_TRACES_EXPORTER" in completed.stderr
