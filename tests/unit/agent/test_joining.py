"""Stating the facts of a machine to a control plane that refuses, fails and is absent, and what an agent remembers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from scheduler.agent import joining
from scheduler.agent.agent_state import AgentIdentity, AgentState, StatedFacts
from scheduler.agent.joining import AgentFacts, JoinRefusedError, join, send_facts
from scheduler.domain.machine import GpuDevice, MachineInventory
from tests.http_server import LoopbackServer, QuietHandler

FACTS = AgentFacts("", "10.0.0.1", "0.1.0", "full", MachineInventory(gpus=(GpuDevice(0, "cpu", "", 0),)))


class ControlPlane:
    """Answers with `answers` in turn: a status and a document. The last one is repeated."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = [(200, {"problem": ""})]
        self.requests: list[tuple[str, str, str, dict[str, Any]]] = []
        plane = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                plane.requests.append((self.command, self.path, self.headers["Authorization"], body))
                status, document = plane.answers.pop(0) if len(plane.answers) > 1 else plane.answers[0]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

            def do_POST(self) -> None:
                self.do_PUT()

        self.server = LoopbackServer(Handler)
        self.identity = AgentIdentity("m 1", ("m 1",), self.server.url, "ebm_x")


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPlane]:
    monkeypatch.setattr(joining, "_MIN_BACKOFF_S", 0.01)
    made = ControlPlane()
    yield made
    made.server.close()


def test_facts_are_sent_with_the_credential_until_they_are_accepted(plane: ControlPlane) -> None:
    plane.answers = [(503, {}), (429, {}), (500, {"detail": "database"}), (200, {"problem": "GPUs are gone"})]
    assert send_facts(plane.identity, FACTS) == "GPUs are gone"
    method, path, credential, document = plane.requests[-1]
    assert (method, path, credential) == ("PUT", "/v1/machines/m%201/facts", "Bearer ebm_x")
    assert (document["address"], document["version"], document["containment"]) == ("10.0.0.1", "0.1.0", "full")
    assert len(plane.requests) == 4


def test_address_is_found_on_the_route_to_the_control_plane(plane: ControlPlane) -> None:
    send_facts(plane.identity, AgentFacts("", "", "0.1.0", "full", MachineInventory()))
    assert plane.requests[0][3]["address"] == "127.0.0.1"


@pytest.mark.parametrize("status", [401, 409, 422])
def test_refusal_ends_the_agent(plane: ControlPlane, status: int) -> None:
    plane.answers = [(status, {"detail": "install 0.2.0"})]
    with pytest.raises(JoinRefusedError, match=r"install 0\.2\.0"):
        send_facts(plane.identity, FACTS)
    assert len(plane.requests) == 1


def test_join_fails_at_once_without_a_control_plane(plane: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("ebj_x")
    plane.answers = [(503, {"detail": "no database"})]
    with pytest.raises(JoinRefusedError, match="no database"):
        join(plane.server.url, tmp_path / "token", name="m1", facts=FACTS)
    plane.answers = [(201, {"machine": {"name": "m1", "nodes": ["m1"]}, "credential": "ebm_y"})]
    assert join(plane.server.url + "/", tmp_path / "token", name="m1", facts=FACTS).url == plane.server.url
    assert plane.requests[-1][3]["name"] == "m1"


@pytest.mark.parametrize("url", ["foo", "ftp://host", "https://", "host:8000", "http://[::1", "http://host:port"])
def test_join_needs_a_url(tmp_path: Path, url: str) -> None:
    (tmp_path / "token").write_text("ebj_x")
    with pytest.raises(JoinRefusedError, match=f"--join: {re.escape(repr(url))} .*https://"):
        join(url, tmp_path / "token", name="m1", facts=FACTS)


@pytest.mark.parametrize("name", ["identity.json", "stated.json", "epoch"])
@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "null", '"7"', '{"machine": "m1", "gpus": "2"}', "\udcff"])
def test_damaged_file_of_the_state_folder_is_named(tmp_path: Path, name: str, text: str) -> None:
    def read() -> None:
        state = AgentState(tmp_path)
        state.read_identity()
        state.complete(StatedFacts())

    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    if (name, text) == ("stated.json", "{}"):
        return  # no fact was stated
    with pytest.raises(ValueError, match=rf"--state: .*/{name} is damaged: .*[Rr]emove"):
        read()


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    state = AgentState(tmp_path)
    identity = {"machine": "m1", "nodes": ["m1"], "url": "http://a", "credential": "ebm_x"}
    (tmp_path / "identity.json").write_text(json.dumps(identity | {"region": "eu"}))
    assert state.read_identity() == AgentIdentity("m1", ("m1",), "http://a", "ebm_x")


def test_stated_facts_of_earlier_starts_count(tmp_path: Path) -> None:
    state = AgentState(tmp_path)
    first = StatedFacts(gpus=2, gpu="cpu", gpu_memory_bytes=5, address="host")
    assert state.complete(first) == first
    state.write_stated(first)
    assert state.complete(StatedFacts()) == first
    assert state.complete(StatedFacts(gpus=4)) == StatedFacts(4, "cpu", 5, "host")
