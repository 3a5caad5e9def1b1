"""The demo's simulated fleet, its view in the terminal, and `ebbtide demo surge`."""

from __future__ import annotations

import io
import os
import pty
import sys
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from rich.console import Console

from cli.demo.day_view import DayView, PoolLine, RecallSummary, TrainingLine, format_day_time, summarize_recalls
from cli.demo.demo_routes import DemoRoutes
from cli.demo.keyboard import read_keys, single_keys
from cli.demo.screen import LineScreen, LiveScreen, render_event
from cli.demo.simulated_fleet import GPU, SIMULATED_PREFIX, build_simulation, list_nodes, list_submissions
from cli.exit_codes import CommandError
from scheduler.documents.job import parse_job
from scheduler.domain.snapshot import Snapshot
from tests.unit.cli.conftest import Run

VIEW = DayView(
    clock="14:20",
    passed=0.6,
    pools=(PoolLine("sim-inference", 60.5, 128, 16, 4, 1, 24),),
    recalls=RecallSummary(total=7, open=1, late=0, margin_s=12.2),
    trainings=(TrainingLine("elastic-wide", "running", 3, 40.0, 180, 2.5, 1),),
    simulated_jobs={"running": 9},
    surge_left_s=0.0,
)


def make_event(code: str, subject: str) -> Any:
    return {"code": code, "subject": subject, "message": "a message", "numbers": {}}


def test_the_simulated_fleet_has_24_nodes_and_30_jobs_that_name_what_they_are() -> None:
    nodes, submissions = list_nodes(), list_submissions()
    assert (len(nodes), {node.gpus for node in nodes}, {node.gpu for node in nodes}) == (24, {8}, {GPU})
    assert {node.pool for node in nodes} == {"sim-training", "sim-inference"}
    assert len(submissions) == 30
    assert [share for share, _ in submissions] == sorted(share for share, _ in submissions)
    assert all(0 <= share < 1 for share, _ in submissions)
    names = [*(node.name for node in nodes), *(job["name"] for _, job in submissions)]
    assert all(name.startswith(SIMULATED_PREFIX) for name in names)


@pytest.mark.parametrize("job", [job for _, job in list_submissions()], ids=lambda job: str(job["name"]))
def test_simulated_jobs_can_run_on_simulated_nodes_alone(job: dict[str, Any]) -> None:
    assert parse_job(job).gpu == GPU


def test_simulated_machines_have_contact_every_few_seconds() -> None:
    now_s, contacts = 1000.0, list[float]()
    simulation = build_simulation(now=lambda: now_s, record_contact=lambda seen: contacts.append(min(seen.values())))
    for _ in range(12):
        simulation.observe()
        now_s += 1.0
    simulation.converge(Snapshot())
    assert contacts == [1000.0, 1005.0, 1010.0]


def test_recalls_are_summarized_by_their_receipts() -> None:
    times = {"asked_at_s": 0.0, "return_by_s": 15.0}
    receipts: list[Any] = [
        {**times, "returned_at_s": 5.0, "outcome": "in_time"},
        {**times, "returned_at_s": 14.0, "outcome": "in_time"},
        {**times, "returned_at_s": 1.0, "outcome": "cancelled"},
        {**times, "returned_at_s": None, "outcome": None},
    ]
    assert summarize_recalls(receipts) == RecallSummary(total=4, open=1, late=0, margin_s=1.0)
    assert summarize_recalls([]).margin_s is None


def test_times_of_the_day_stay_within_it() -> None:
    assert [format_day_time(share) for share in (-0.5, 0.0, 0.6, 2.0)] == ["00:00", "00:00", "14:24", "24:00"]


def test_steps_of_simulated_jobs_are_not_shown() -> None:
    assert render_event(0.5, make_event("JobGrown", "sim-pretrain-1-abc")) is None
    assert render_event(0.5, make_event("JobState", "elastic-wide-abc")) is None
    assert render_event(0.5, make_event("JobGrown", "elastic-wide-abc")) is not None
    assert render_event(0.5, make_event("NodeRecalled", "sim-i00")) is not None


def test_a_terminal_shows_the_state_and_how_to_cause_a_surge() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=40)
    with LiveScreen(console, hint="press s for a surge of demand") as screen:
        screen.show(VIEW, [(0.5, make_event("NodeRecalled", "sim-i00"))])
    shown = out.getvalue()
    assert all(text in shown for text in ("14:20", "4 of 16", "press s", "7 recalls", "40 of 180", "sim-i00"))


def test_other_output_has_one_line_an_hour() -> None:
    out = io.StringIO()
    with LineScreen(Console(file=out, width=200)) as screen:
        for _ in range(3):
            screen.show(VIEW, [])
    assert out.getvalue().count("14:20") == 1
    assert "\x1b" not in out.getvalue()


def test_keys_are_read_without_enter() -> None:
    parent, child = pty.openpty()
    with os.fdopen(child) as terminal, patch.object(sys, "stdin", terminal), single_keys() as has_keys:
        assert has_keys
        assert read_keys() == ""
        os.write(parent, b"xS")
        assert sorted(read_keys() + read_keys()) == ["s", "x"]
    os.close(parent)


def test_a_service_that_is_no_demo_refuses_a_surge(run: Run) -> None:
    result = run("demo", "surge", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1


def test_problems_of_the_service_are_errors() -> None:
    def refuse(status: int) -> DemoRoutes:
        routes = DemoRoutes("http://demo.test", "token")
        transport = httpx.MockTransport(lambda request: httpx.Response(status, json={"detail": "no"}))
        routes._connection = httpx.Client(base_url="http://demo.test", transport=transport)
        return routes

    for status in (403, 404, 500):
        with refuse(status) as routes, pytest.raises(CommandError):
            routes.surge()
