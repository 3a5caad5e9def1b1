"""`ebbtide profile` on one GPU: the measurements that CPUs cannot test, at sizes that take seconds.

`python -m tests.cuda.profile_gpu OUT` profiles a GPU at full size, and validates the profile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scheduler.profiling.measurement_log import MeasurementLog
from scheduler.profiling.tasks import HostLinkTask
from scheduler.solver.profiles.catalog import parse_gpu

LIMIT_S = 150.0


def test_a_gpu_is_profiled_and_validated(tmp_path: Path) -> None:
    out, table = tmp_path / "gpu.json", tmp_path / "steps.csv"
    words = ("--device", "cuda", "--scale", "tiny", "--rounds", "1", "--allow-busy", "--validate", "--plans", "2")
    argv = [sys.executable, "-m", "cli", "profile", "--out", str(out), "--table", str(table), *words, "-o", "json"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    document = json.loads(ended.stdout)
    assert (document["skipped"], document["failed"]) == (0, []), document["failed"]
    device = document["device"]
    assert device["kind"] == "cuda"
    assert 2e8 < device["context_bytes"] < 5e9
    hardware = parse_gpu(out.read_text())
    assert hardware.memory_bytes == device["memory_bytes"]
    assert hardware.precision.value == "bf16"
    log = MeasurementLog(out.with_suffix(".jsonl"))
    assert any(isinstance(each.task, HostLinkTask) for each in log.measurements)
    assert all(step["measured_bytes"] > device["context_bytes"] for step in document["validation"]["steps"])
