"""`ebbtide simulate`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from api.console_assets import MissingChartLibraryError
from cli.simulation.comparison_table import METRICS
from cli.simulation.report import render_page
from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import ENTRY_POINTS, PolicySet
from tests.builders_simulation import build_policy_series
from tests.unit.cli.conftest import Page, Run, needs_charts

FILES = ("simulate", "--jobs", "jobs.csv", "--cluster", "cluster.yaml", "--processes", "1")
SIMULATE = (*FILES, "--demand", "demand.csv", "--seed", "3")
CLUSTER = """
pools:
  - {name: training, kind: training, nodes: 1, gpus_per_node: 4, gpu: a100-80g}
  - {name: inference, kind: inference, nodes: 1, gpus_per_node: 4, gpu: a100-80g, lending: {headroom: 0}}
"""
NOT_SHOWN = ("jobs rejected", "deadlines met", "illegal decisions, dropped")
"""Metrics that did not occur."""
FIGURES_OF_THE_CONTRACT = """
    policy jobs completed queueing_s jct_s jct_elastic_s jct_bound_s makespan_s usage_ratio
    idle_while_waiting_gpu_hours loaned_gpu_hours unused_loan_gpu_hours loans recalls recalls_late preemptions
    preemption_ratio resizes collateral_gpus lost_gpu_hours lost_ratio inference_short_intervals_ratio
    ticks tick_s wall_s deadlines_met_ratio rejected
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = "".join(f"j{number},{number * 30},600,{1 + number % 2}\n" for number in range(8))
    Path("jobs.csv").write_text("job_id,submit_time_s,duration_s,gpus\n" + jobs)
    Path("demand.csv").write_text("time_s,pool,gpus\n0,inference,1\n300,inference,0\n")
    Path("cluster.yaml").write_text(CLUSTER)


def test_json_has_the_seed_and_one_report_per_policy(run: Run) -> None:
    result = run(*SIMULATE, "--policy", "fifo,ebbtide", "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["seed"] == 3
    assert [report["policy"] for report in document["policies"]] == ["fifo", "ebbtide"]
    for report in document["policies"]:
        assert set(FIGURES_OF_THE_CONTRACT.split()) <= set(report)
        assert (report["jobs"], report["completed"]) == (8, 8)


def test_table_has_one_column_per_policy_and_one_row_per_metric(run: Run) -> None:
    result = run(*SIMULATE, "--policy", "fifo,ebbtide")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["seed", "3", "fifo", "ebbtide"]
    shown = [figure for figure in METRICS if figure not in NOT_SHOWN]
    assert [line[: len(figure)] for line, figure in zip(lines[1:], shown, strict=True)] == shown
    assert lines[1].split() == ["jobs", "completed", "8", "of", "8", "8", "of", "8"]


def test_table_is_split_to_fit_the_terminal(run: Run) -> None:
    names = "fifo,sjf,srtf,srsf,las,edf,elastic-deadline,opportunistic,afs,lyra,ebbtide"
    lines = run(*SIMULATE, "--policy", names).stdout.splitlines()
    heads = [line.split()[2:] for line in lines if line.startswith("seed 3")]
    assert (len(heads), [name for head in heads for name in head]) == (2, names.split(","))
    assert max(map(len, lines)) <= 100
    shown = [figure for figure in METRICS if figure not in NOT_SHOWN]
    assert len(lines) == 2 * (1 + len(shown)) + 1, "no cell is folded"


def test_limit_uses_the_first_jobs(run: Run) -> None:
    [report] = json.loads(run(*SIMULATE, "--limit", "3", "-o", "json").stdout)["policies"]
    assert (report["policy"], report["jobs"]) == ("ebbtide", 3)


def test_policies_are_listed_without_files(run: Run) -> None:
    listed = json.loads(run("simulate", "--policy", "list", "-o", "json").stdout)
    by_name = {policy["name"]: policy for policy in listed}
    assert {"fifo", "ebbtide"} <= set(by_name)
    assert (by_name["fifo"]["lends"], by_name["ebbtide"]["lends"]) == (False, True)
    assert all(policy["summary"] and policy["paper"] for policy in listed)
    table = run("simulate", "--policy", "list").stdout
    assert all(name in table for name in by_name)


def test_sweep_prints_means_with_confidence_intervals(run: Run) -> None:
    words = (*SIMULATE, "--seeds", "2", "--policy", "fifo")
    document = json.loads(run(*words, "-o", "json").stdout)
    assert (set(document), document["seeds"]) == ({"seeds", "policies", "runs"}, [3, 4])
    waiting = document["policies"][0]["figures"]["queueing_s.mean"]
    assert waiting["low"] <= waiting["mean"] <= waiting["high"]
    lines = run(*words).stdout.splitlines()
    assert lines[0].split() == ["seeds", "3,", "4", "fifo"]
    assert lines[1].split()[2:] == ["8", "±", "0", "of", "8"]


@pytest.mark.parametrize("seeds", ["1", "0", "-3", "many", "1,1", "1,-2", "2,", "1001"])
def test_invalid_seeds_are_rejected(run: Run, seeds: str) -> None:
    result = run(*FILES, "--seeds", seeds)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--seeds: '{seeds}'" in result.stderr


def test_seed_and_list_of_seeds_are_exclusive(run: Run) -> None:
    assert "--seed: 3 cannot be combined with the list --seeds 1,2" in run(*SIMULATE, "--seeds", "1,2").stderr


def test_demand_is_required_with_inference_pools_only(run: Run) -> None:
    result = run(*FILES)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "demand: " in result.stderr
    Path("cluster.yaml").write_text("\n".join(CLUSTER.splitlines()[:3]))
    assert json.loads(run(*FILES, "-o", "json").stdout)["policies"][0]["completed"] == 8
    refused = run(*FILES, "--demand", "demand.csv")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "demand" in refused.stderr


@needs_charts
def test_report_folder_has_json_markdown_charts_and_a_self_contained_page(run: Run) -> None:
    Path("demand.csv").write_text("time_s,pool,gpus\n0,inference,0\n")
    words = ("--policy", "fifo,ebbtide", "--forecast", "oracle", "--report", "out/first", "-o", "json")
    result = run(*SIMULATE, *words)
    folder = Path("out/first")
    assert json.loads((folder / "report.json").read_text()) == json.loads(result.stdout)
    table = [line.strip("| ").split(" | ") for line in (folder / "report.md").read_text().splitlines()]
    assert (table[0], table[2]) == (["seed 3", "fifo", "ebbtide"], ["jobs completed", "8 of 8", "8 of 8"])
    assert {len(line) for line in table} == {3}
    pictures = sorted(path.stem for path in folder.glob("*.png"))
    assert pictures == ["completion", "lending", "queue", "usage"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    page = Page((folder / "report.html").read_text())
    assert page.loaded == []
    assert read_chart_policies(folder) == ["fifo", "ebbtide"]
    pools = "training 1 × 4 a100-80g + inference 1 × 4 a100-80g"
    assert f"8 jobs of jobs.csv, demand.csv on {pools}; forecast oracle; seed 3" in page.texts


def read_chart_policies(folder: Path) -> list[str]:
    """Return the policy sets whose series the page embeds."""
    found = re.search(r'id="data">(.+?)</script>', (folder / "report.html").read_text())
    assert found is not None
    return [series["policy"] for series in json.loads(found[1])["data"]["series"]]


@needs_charts
def test_page_of_long_runs_stays_small(run: Run) -> None:
    document = json.loads(run(*SIMULATE, "-o", "json").stdout)
    series = [build_policy_series(f"policy-{number}", 2000) for number in range(7)]
    for shown in (series[:1], series):
        assert len(render_page(document, "", shown).encode()) < 400_000


def test_missing_chart_library_is_reported_before_simulating(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise MissingChartLibraryError

    monkeypatch.setattr("cli.report_page.load_report_assets", load)
    result = run("simulate", "--jobs", "none.csv", "--cluster", "none.yaml", "--report", "out")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "npm ci" in result.stderr
    assert not Path("out").exists()


@needs_charts
def test_report_without_matplotlib_has_no_pictures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.simulation.charts.find_spec", lambda _: None)
    result = run(*SIMULATE, "--policy", "fifo", "--report", "out")
    assert result.exit_code == 0
    assert "pip install 'ebbtide-server[plot]'" in result.stderr
    assert sorted(path.name for path in Path("out").iterdir()) == ["report.html", "report.json", "report.md"]


@needs_charts
def test_report_states_repeated_demand_and_the_lower_bound(run: Run) -> None:
    Path("jobs.csv").write_text("job_id,submit_time_s,duration_s,gpus\na,0,600,1\nb,3600,600,1\n")
    run(*SIMULATE, "--policy", "fifo,sjf,ebbtide", "--report", "out")
    text = (Path("out") / "report.html").read_text()
    assert "demand repeats every 10m00s at varying levels; seed 3" in text
    assert text.count("The lower bound of this trace") == 1


@needs_charts
def test_report_of_a_sweep_without_lending(run: Run) -> None:
    Path("out").mkdir()
    (Path("out") / "lending.png").write_text("of an earlier report")
    run(*SIMULATE, "--policy", "fifo", "--seeds", "2", "--report", "out")
    assert sorted(path.stem for path in Path("out").glob("*.png")) == ["completion", "queue", "usage"]
    text = (Path("out") / "report.html").read_text()
    assert "95% confidence intervals" in text
    assert "All seeds gave the same values" in text
    assert "seeds 3, 4" in text
    assert " ± " in (Path("out") / "report.md").read_text()


@needs_charts
def test_unwritable_report_folder_is_rejected_before_simulating(run: Run) -> None:
    Path("out").write_text("a file")
    result = run("simulate", "--jobs", "none.csv", "--cluster", "none.yaml", "--report", "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--report: out cannot be created" in result.stderr


def mine(settings: PolicySettings) -> PolicySet:
    def always_on_the_first(snapshot: object, rooms: Iterable[FreeGpus], job: object, count: int) -> Gpus:
        return {next(iter(rooms)).node: tuple(range(count))}

    return PolicySet("mine", "puts all jobs on the same GPUs", "none", place=always_on_the_first, settings=settings)


def fails_later(settings: PolicySettings) -> PolicySet:
    def no_order(snapshot: object, settings: object) -> tuple[str, ...]:
        raise KeyError("a table of mine")

    return PolicySet("fails", "fails at its first job", "none", order=no_order, settings=settings)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policy sets from another package's entry points."""
    points = [
        EntryPoint(name, f"{__name__}:{at}", ENTRY_POINTS) for name, at in (("mine", "mine"), ("fails", "fails_later"))
    ]
    monkeypatch.setattr("scheduler.scheduling.policy_sets.find_entry_points", lambda: points)


@needs_charts
def test_policy_with_illegal_decisions_is_named(run: Run, own: None) -> None:
    result = run(*SIMULATE, "--policy", "fifo,mine", "--report", "out", "-o", "json")
    assert result.exit_code == 0
    assert "illegal decisions of policy mine: gpu-held-twice: " in result.stderr
    assert "j1" in result.stderr
    assert [report["violations"] > 0 for report in json.loads(result.stdout)["policies"]] == [False, True]
    assert "mine: " in (Path("out") / "report.html").read_text()


@needs_charts
def test_policy_that_raises_is_named_and_no_report_is_written(run: Run, own: None) -> None:
    result = run(*SIMULATE, "--policy", "fifo,fails", "--report", "out", "-o", "json")
    assert (result.exit_code, result.stdout) == (1, "")
    message = json.loads(result.stderr)["error"]["message"]
    assert message.startswith("policy fails failed at 0 s: KeyError: 'a table of mine' (test_simulate.py")
    assert not Path("out").exists()
