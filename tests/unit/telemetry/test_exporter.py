"""The exporter serves metrics that another process wrote to the folder, and stops on SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

PROGRAM = "from scheduler.telemetry.metrics import RECALLS_LATE; RECALLS_LATE.inc(3)"


def test_exporter_serves_metrics_of_another_process_and_creates_no_files(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=60)
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-m", "scheduler.telemetry.exporter", "--folder", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stderr is not None
        address = re.search(r"127\.0\.0\.1:(\d+)", exporter.stderr.readline())
        assert address is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics", timeout=30) as answer:
            assert "\nebbtide_recalls_late_total 3.0\n" in answer.read().decode()
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(30) == 0
    assert sorted(tmp_path.iterdir()) == before


def test_error_names_a_missing_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scheduler.telemetry.exporter", "--folder", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert repr(str(tmp_path / "none")) in done.stderr
