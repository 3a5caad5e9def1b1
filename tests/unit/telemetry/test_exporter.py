"""The exporter shows what another process counted into the folder, and ends when it is told to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

COUNTING = "from scheduler.telemetry.metrics import RECALLS_LATE; RECALLS_LATE.inc(3)"


def test_it_shows_what_another_process_counted_and_leaves_no_file_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COUNTING], env=environment, check=True, timeout=60)
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-m", "scheduler.telemetry.exporter", "--folder", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stderr is not None
        told = re.search(r"127\.0\.0\.1:(\d+)", exporter.stderr.readline())
        assert told is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{told[1]}/metrics", timeout=30) as answer:
            assert "\nebbtide_recalls_late_total 3.0\n" in answer.read().decode()
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(30) == 0
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scheduler.telemetry.exporter", "--folder", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"{str(tmp_path / 'none')!r} is no folder" in done.stderr
