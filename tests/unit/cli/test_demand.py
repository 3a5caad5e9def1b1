"""`ebbtide demand`, against the real API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import Result

Ask = Callable[..., Any]
Run = Callable[..., Result]
START_S = 1_789_000_000


def write_demand(path: Path, *, first_s: int, header: str = "time_s,pool,gpus", pool: str = "serving") -> Path:
    rows = [f"{first_s + 300 * at},{pool},{at % 3}" for at in range(300)]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def refusal(run: Run, *words: str) -> str:
    result = run(*words)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_file_becomes_the_history_and_the_present_demand(ask: Ask, fleet: Any, tmp_path: Path) -> None:
    answer = ask("demand", "push", "serving", str(write_demand(tmp_path / "demand.csv", first_s=START_S)))
    assert (answer["accepted"], answer["backfilled"]) == (300, 299)
    assert answer["at_s"] == START_S + 300 * 299
    fleet.tick()
    assert ask("demand", "show", "serving")["latest"]["gpus"] == 2.0
    again = ask("demand", "push", "serving", str(tmp_path / "demand.csv"))
    assert (again["accepted"], again["backfilled"]) == (299, 299)


def test_load_of_a_relative_file_needs_a_peak_and_an_end(run: Run, ask: Ask, fleet: Any, tmp_path: Path) -> None:
    file = str(write_demand(tmp_path / "load.csv", first_s=0, header="time_s,pool,load", pool="chat"))
    assert "chat" in refusal(run, "demand", "push", "serving", file)
    named = ("demand", "push", "serving", file, "--series", "chat")
    assert "peak_gpus" in refusal(run, *named)
    assert "--end" in refusal(run, *named, "--peak-gpus", "1")
    # The service's clock is behind that of this machine.
    answer = ask(*named, "--peak-gpus", "1", "--end", "52w")
    assert (answer["accepted"], answer["gpus"]) == (300, 1.0)


def test_source_is_set_and_cleared(run: Run, ask: Ask, fleet: Any, tmp_path: Path) -> None:
    source = tmp_path / "source.yaml"
    source.write_text(yaml.safe_dump({"queries": [{"preset": "kserve", "gpus_per_replica": 2}]}))
    shown = ask("demand", "set-source", "serving", str(source))
    assert shown["demand_source"]["queries"] == [{"preset": "kserve", "replicas_min": 1, "gpus_per_replica": 2.0}]
    assert ask("demand", "clear-source", "serving")["demand_source"] is None
    source.write_text(json.dumps({"queries": [{"promql": "avg(DCGM_FI_DEV_GPU_UTIL)"}]}))
    assert "DCGM_FI_DEV_GPU_UTIL" in refusal(run, "demand", "set-source", "serving", str(source))


def test_source_of_requests_needs_an_entry_for_each_served_model(
    run: Run, ask: Ask, fleet: Any, tmp_path: Path
) -> None:
    served, source = tmp_path / "served.yaml", tmp_path / "source.yaml"
    objective = {"ttft": "1s", "tpot": "50ms"}
    served.write_text(yaml.safe_dump({"model": "llama-3-8b", "gpu": "a100-80g", "objective": objective}))
    source.write_text(yaml.safe_dump({"requests": [{"model": "llama-3-8b", "preset": "vllm"}]}))
    refused = run("demand", "set-source", "serving", str(source))
    assert refused.exit_code == 3
    assert "llama-3-8b" in refused.stderr
    ask("serving", "set", "serving", str(served))
    (shown,) = ask("demand", "set-source", "serving", str(source))["demand_source"]["requests"]
    assert (shown["model"], shown["preset"], shown["window"]) == ("llama-3-8b", "vllm", 300.0)
    assert "requests for 1 model" in run("demand", "set-source", "serving", str(source)).stdout
