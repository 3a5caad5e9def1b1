"""Generations of one rank through the trainer's command line, with or without the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.rank_launcher import REPOSITORY, Training

TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that has ended."""

    code: int
    status: dict[str, Any]
    log: str


def run_generation(training: Training, generation: int, *, on_gpu: bool, steps: int = 0) -> Generation:
    """Run the command until it ends.

    Args:
        steps: last step of this generation; 0 for that of the training.
    """
    run_dir = training.root / f"run-{generation}"
    run_dir.mkdir(parents=True)
    completed = subprocess.run(
        training.argv(),
        cwd=REPOSITORY,
        env={**os.environ, **_make_environment(training, generation, run_dir, steps), **({} if on_gpu else _NO_GPU)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    status = json.loads((run_dir / "status-0.json").read_text())
    return Generation(completed.returncode, status, (completed.stdout + completed.stderr)[-6000:])


_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def _make_environment(training: Training, generation: int, run_dir: Path, steps: int) -> dict[str, str]:
    return {
        "EBBTIDE_JOB_ID": training.root.name,
        "EBBTIDE_GENERATION": str(generation),
        "EBBTIDE_CHECKPOINT_DIR": str(training.checkpoints),
        "EBBTIDE_CHECKPOINT_KEEP": "10",
        "EBBTIDE_RUN_DIR": str(run_dir),
        "EBBTIDE_STEPS": str(steps or training.steps),
    }


def run_program(module: str, *words: str, timeout_s: float = TIMEOUT_S, **environment: str) -> dict[str, Any]:
    """Run a program that prints one JSON object as its last line, and return the object."""
    completed = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    output = completed.stdout + completed.stderr
    assert completed.returncode == 0, output[-8000:]
    document: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    return document
