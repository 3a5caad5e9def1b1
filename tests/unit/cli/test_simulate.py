"""`simulate` at the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from scheduler.cli.simulation_view import FIGURES

Run = Callable[..., Result]
SIMULATE = ("simulate", "--jobs", "jobs.csv", "--demand", "demand.csv", "--cluster", "cluster.yaml", "--seed", "3")
CLUSTER = """
pools:
  - {name: training, kind: training, nodes: 1, gpus_per_node: 4, gpu: a100-80g}
  - {name: inference, kind: inference, nodes: 1, gpus_per_node: 4, gpu: a100-80g}
"""
FIGURES_OF_THE_CONTRACT = """
    policy jobs completed queueing_s jct_s jct_elastic_s jct_bound_s makespan_s usage_ratio
    idle_while_waiting_gpu_hours loaned_gpu_hours loans recalls recalls_late preemptions preemption_ratio resizes
    collateral_gpus lost_gpu_hours lost_ratio inference_short_intervals_ratio ticks tick_s wall_s
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = "".join(f"j{number},{number * 30},600,{1 + number % 2}\n" for number in range(8))
    Path("jobs.csv").write_text("job_id,submit_time_s,duration_s,gpus\n" + jobs)
    Path("demand.csv").write_text("time_s,pool,gpus\n0,inference,1\n300,inference,0\n")
    Path("cluster.yaml").write_text(CLUSTER)


def test_json_is_the_seed_and_one_report_a_policy(run: Run) -> None:
    result = run(*SIMULATE, "--policy", "fifo,ebbtide", "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert told["seed"] == 3
    assert [report["policy"] for report in told["policies"]] == ["fifo", "ebbtide"]
    for report in told["policies"]:
        assert set(FIGURES_OF_THE_CONTRACT.split()) <= set(report)
        assert (report["jobs"], report["completed"]) == (8, 8)


def test_the_table_has_a_column_a_policy_and_a_line_a_figure(run: Run) -> None:
    result = run(*SIMULATE, "--policy", "fifo,ebbtide")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["seed", "3", "fifo", "ebbtide"]
    assert [line[: len(figure)] for line, figure in zip(lines[1:], FIGURES, strict=True)] == list(FIGURES)
    assert lines[1].split() == ["jobs", "completed", "8", "of", "8", "8", "of", "8"]


def test_a_limit_takes_the_first_jobs(run: Run) -> None:
    [report] = json.loads(run(*SIMULATE, "--limit", "3", "-o", "json").stdout)["policies"]
    assert (report["policy"], report["jobs"]) == ("ebbtide", 3)


def test_the_policies_can_be_listed_without_files(run: Run) -> None:
    listed = json.loads(run("simulate", "--policy", "list", "-o", "json").stdout)
    by_name = {policy["name"]: policy for policy in listed}
    assert {"fifo", "ebbtide"} <= set(by_name)
    assert (by_name["fifo"]["lends"], by_name["ebbtide"]["lends"]) == (False, True)
    assert "first come, first served" in run("simulate", "--policy", "list").stdout
