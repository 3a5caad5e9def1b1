"""`ebbtide forecast` and `ebbtide lending frontier` on recorded demand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.forecast.demands import make_days


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demand") / "demand.csv"
    times_s, gpus = make_days(12, noise=0.1)
    lines = [f"{time_s:g},served,{value:.3f}" for time_s, value in zip(times_s, gpus, strict=True)]
    path.write_text("\n".join(["time_s,pool,gpus", *lines]) + "\n")
    return path


def test_backtest_scores_each_method_at_each_horizon(run: Run, recorded: Path) -> None:
    options = ("--horizon", "1h", "--horizon", "3h", "--target", "value")
    result = run("forecast", "backtest", "--demand", str(recorded), *options, "-o", "json")
    rows = json.loads(result.stdout)["results"]
    assert [(row["series"], row["horizon_s"], row["target"]) for row in rows] == [
        ("served", 3600.0, "value"),
        ("served", 10800.0, "value"),
    ]
    for row in rows:
        losses = {score["method"]: score["loss"] for score in row["scores"]}
        assert losses["combination"] < losses["persistence"]
        assert set(row["scores"][0]["coverage"]) == {"0.95", "0.999"}
    assert "combination" in run("forecast", "backtest", "--demand", str(recorded)).stdout


def test_invalid_input_is_refused_by_name(run: Run, recorded: Path, tmp_path: Path) -> None:
    for options, named in ((("--horizon", "soon"), "--horizon"), (("--time-zone", "Mars/Olympus"), "Mars/Olympus")):
        refused = run("forecast", "backtest", "--demand", str(recorded), *options)
        assert (refused.exit_code, named in refused.stderr) == (2, True)
    short = tmp_path / "short.csv"
    short.write_text("time_s,pool,gpus\n0,served,4\n3600,served,5\n")
    refused = run("forecast", "backtest", "--demand", str(short))
    assert (refused.exit_code, "served" in refused.stderr) == (2, True)


def test_frontier_compares_forecasts_with_the_oracle(run: Run, recorded: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    own = "{name: own, kind: training, nodes: 1, gpus_per_node: 8, gpu: a100-80g}"
    served = "{name: served, kind: inference, nodes: 24, gpus_per_node: 8, gpu: a100-80g, lending: {}}"
    cluster.write_text(f"pools:\n- {own}\n- {served}\n")
    words = ("lending", "frontier", "--demand", str(recorded), "--cluster", str(cluster))
    points = json.loads(run(*words, "-o", "json").stdout)["points"]
    oracle = next(point for point in points if point["method"] == "oracle")
    assert (oracle["oracle_share"], oracle["short_ratio"]) == (1.0, 0.0)
    promise = points[0]
    assert (promise["method"], promise["quantile"]) == ("shortage target", None)
    assert 0.3 < promise["oracle_share"] < 1.0
    assert promise["short_ratio"] <= 0.01
    combined = {point["quantile"]: point for point in points if point["method"] == "combination"}
    assert 0.4 < combined[0.999]["oracle_share"] < combined[0.9]["oracle_share"] <= 1.0
    assert combined[0.999]["short_ratio"] <= combined[0.9]["short_ratio"]
    assert "oracle" in run(*words).stdout


@pytest.mark.parametrize(("options", "zone"), [((), "Asia/Kolkata"), (("--time-zone", "UTC"), "UTC")])
def test_frontier_follows_the_clock_of_each_pool(
    run: Run, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], zone: str
) -> None:
    zones, cluster = list[str](), tmp_path / "cluster.yaml"
    own = "{name: own, kind: training, nodes: 1, gpus_per_node: 8, gpu: a100-80g}"
    lending = "{time_zone: Asia/Kolkata}"
    served = f"{{name: served, kind: inference, nodes: 24, gpus_per_node: 8, gpu: a100-80g, lending: {lending}}}"
    cluster.write_text(f"pools:\n- {own}\n- {served}\n")

    def record_zone(*args: Any, zone: str, **more: Any) -> tuple[()]:
        zones.append(zone)
        return ()

    monkeypatch.setattr("scheduler.simulator.lending_frontier.compute_frontier", record_zone)
    run("lending", "frontier", "--demand", str(recorded), "--cluster", str(cluster), *options)
    assert zones == [zone]
