"""Whoever adds a setting, a metric or a route has to say in README.md what it is for."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from api.app import create_app
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import ManualClock
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.settings import Settings
from scheduler.store.memory_store import MemoryStore
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import REGISTRY
from scheduler.worker import session
from tests.memory_run_log import MemoryRunLog

README = Path(__file__).resolve().parent.parent / "README.md"


def _undocumented(names: set[str]) -> list[str]:
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return sorted(name for name in names if not any(f"`{name}`" in row for row in rows))


def test_the_readmes_training_script_is_the_sessions_own_example_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (session.__doc__ or "").partition("    from")[2].partition("\nWithout")[0]
    assert f"    from{example}" in README.read_text(encoding="utf-8")
    monkeypatch.setenv("EBBTIDE_STEPS", "3")
    saved: list[int] = []
    names: dict[str, Any] = {
        "build_or_load": lambda plan, folder: ("model", "optimizer", 0),
        "train_one_step": lambda model, optimizer: 1.0,
        "save": lambda model, optimizer, step: saved.append(step),
    }
    exec(dedent(f"    from{example}"), names)
    names["main"]()
    assert saved == [3]


def test_every_setting_stands_in_a_table_of_the_readme() -> None:
    assert _undocumented({f"EBBTIDE_{name.upper()}" for name in Settings.model_fields}) == []


def test_every_metric_stands_in_a_table_of_the_readme() -> None:
    gauges = FleetGauges(Snapshot(), has_leader=True, inbox_size=0, by_job=True)
    families = [*REGISTRY.collect(), *gauges.collect()]
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert _undocumented(names) == []


def test_every_route_stands_in_a_table_of_the_readme() -> None:
    app = create_app(
        MemoryStore(),
        Settings(),
        clock=ManualClock(),
        policies=load_policy_set("ebbtide"),
        lease=lambda: None,
        token_secret=b"a secret of this test alone, 32+",
        run_log=MemoryRunLog(),
    )
    assert _undocumented(set(app.openapi()["paths"])) == []
