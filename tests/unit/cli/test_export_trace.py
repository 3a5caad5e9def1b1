"""`ebbtide export-trace` on the database of a real service, and `ebbtide simulate` on the exported files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from scheduler.documents.trace_files import read_demand, read_jobs
from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, ReportDemand, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node, a_spec

Run = Callable[..., Result]
START_S = 1_790_000_000.0
CLUSTER = """
pools:
  - {name: training, kind: training, nodes: 1, gpus_per_node: 8, gpu: a100-80g}
  - {name: inference, kind: inference, nodes: 1, gpus_per_node: 8, gpu: a100-80g}
"""


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    return url


def run_service(url: str, until_s: float) -> None:
    """Run a controller with three jobs: one ends, one keeps running, one has an unknown duration."""
    store, clock, sent = SqlStore(url), ManualClock(START_S), 0
    nodes = [a_node("t0", "training"), a_node("i0", "inference")]
    executor = SimulatedExecutor(nodes, delays=Delays(start_s=0.0), now_s=START_S)

    def send(body: CommandBody) -> None:
        nonlocal sent
        sent += 1
        store.send(Command(f"c{sent}", clock.now_s(), body))

    for name, kind in (("training", PoolKind.TRAINING), ("inference", PoolKind.INFERENCE)):
        send(CreatePool(Pool(name, kind)))
    for node in nodes:
        send(AddNode(node))
    send(ReportDemand("inference", 5.0))
    send(SubmitJob("short", a_spec(4, steps=400, name="short")))
    send(SubmitJob("long", a_spec(4, steps=40_000, name="long", queue="research")))
    send(SubmitJob("unknown", a_spec(8, steps=0, name="unknown")))
    lease = store.acquire_lease("tests", now_s=START_S, ttl_s=1e9)
    assert lease is not None
    while clock.now_s() < START_S + until_s:
        report = tick(store, executor, clock, load_policy_set("fifo"), epoch=lease.epoch)
        next_s = min(max(clock.now_s(), executor.next_event_s()), report.next_wake_s, START_S + until_s)
        clock.move_to(next_s)
        executor.advance_to(next_s)
    send(ReportDemand("inference", 1.0))
    tick(store, executor, clock, load_policy_set("fifo"), epoch=lease.epoch)
    store.close()


def test_exported_history_can_be_simulated(run: Run, database: str) -> None:
    run_service(database, 600.0)
    words = ("export-trace", "--jobs", "jobs.csv.gz", "--demand", "demand.csv", "--database-url", database)
    exported = run(*words, "-o", "json")
    assert exported.exit_code == 0, exported.output
    assert json.loads(exported.stdout) == {"jobs": 2, "demand": 2, "skipped": ["unknown"]}
    short, long = sorted(read_jobs(Path("jobs.csv.gz")), key=lambda row: row.duration_s)
    assert (short.job_id, short.gpus, short.duration_s, short.submit_time_s) == ("short", 4, 100.0, 0.0)
    assert (long.job_id, long.gpus, long.queue, long.duration_s) == ("long", 4, "research", 10_000.0)
    assert [(row.time_s, row.amount) for row in read_demand(Path("demand.csv"))] == [(0.0, 5.0), (600.0, 1.0)]

    Path("cluster.yaml").write_text(CLUSTER)
    files = ("--jobs", "jobs.csv.gz", "--demand", "demand.csv", "--cluster", "cluster.yaml")
    played = run("simulate", *files, "--policy", "fifo", "-o", "json")
    assert played.exit_code == 0, played.output
    [report] = json.loads(played.stdout)["policies"]
    assert (report["completed"], report["jct_s"]["mean"]) == (2, 5050.0)


def test_export_of_an_unused_service_fails(run: Run, database: str) -> None:
    result = run("export-trace", "--database-url", database)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing to export" in result.stderr
    assert not Path("jobs.csv").exists()


def test_database_without_a_schema_is_rejected(run: Run, tmp_path: Path) -> None:
    result = run("export-trace", "--database-url", f"sqlite:///{tmp_path / 'empty.sqlite'}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--database-url: " in result.stderr
