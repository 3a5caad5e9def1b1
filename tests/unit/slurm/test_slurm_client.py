"""Answers of Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.slurm.slurm_client import manages_gpus


@pytest.mark.parametrize(
    ("types", "expected"), [("gpu", True), ("license,gpu", True), ("(null)", False), ("gpu_mem", False)]
)
def test_gpus_are_managed_where_they_are_a_generic_resource(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: str, expected: bool
) -> None:
    program = tmp_path / "scontrol"
    program.write_text(
        f"#!/bin/sh\necho 'GpuFreqDef              = (null)'\necho 'GresTypes               = {types}'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert manages_gpus() is expected
