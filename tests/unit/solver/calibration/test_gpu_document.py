"""Hardware profiles written as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scheduler.solver.calibration.hardware_constants import format_gpu_document
from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu, parse_gpu
from scheduler.solver.profiles.hardware_profile import Collective, CollectiveTable


@pytest.mark.parametrize("name", list_gpu_names())
def test_written_profile_parses_to_the_same_profile(name: str) -> None:
    assert parse_gpu(format_gpu_document(load_gpu(name), source="a test", sources={})) == load_gpu(name)


def test_collectives_and_sources_are_written() -> None:
    table = CollectiveTable(Collective.ALL_REDUCE, 4, ((1e3, 1e-5), (1e6, 1e-4)))
    profile = replace(load_gpu("h200"), collectives=(table,))
    text = format_gpu_document(profile, source="given", sources={"efficiency": "fitted"})
    assert parse_gpu(text) == profile
    assert json.loads(text)["efficiency"]["source"] == "fitted"
    assert json.loads(text)["launch_s"]["source"] == "given"
