"""Invalid profile folders are rejected with file and field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baselines.galvatron.comparison import compare_with_galvatron
from baselines.galvatron.strategy_space import MemoryLimitReading
from scheduler.solver.profiles.profile_document import ProfileError
from tests.builders_galvatron import SOLVED

MEMORY = "memory_profiling_bf16_llama2-7b_all.json"
TIMES = "computation_profiling_bf16_llama2-7b_all.json"
ALL_REDUCE = "allreduce_bandwidth_1nodes_8gpus_per_node.json"
LATENCIES = "sp_time_1nodes_8gpus_per_node.json"
P2P = "p2p_bandwidth_1nodes_8gpus_per_node.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = next(folder for folder in SOLVED if "8gpu_24GB" in folder.name)
    return Path(shutil.copytree(source, tmp_path / "profile"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        (MEMORY, lambda d: activations(d).pop("4"), "degree 4 is not profiled; profiled are [1, 2, 8]"),
        (MEMORY, lambda d: activations(d).pop("checkpoint"), "tp_activation_per_bsz_dict: field 'checkpoint' is miss"),
        (MEMORY, lambda d: d.pop("other_memory_pp_off_sp"), "field 'other_memory_pp_off_sp' is missing"),
        (MEMORY, lambda d: d.update(layertype_0_sp=[]), "layertype_0_sp is []; it must be a JSON object"),
        (MEMORY, lambda d: activations(d).update({"1": float("nan")}), "dict.1 is nan; it must be a number from 1e-15"),
        (TIMES, lambda d: d.update(layertype_0_bsz1_seq2048=-1), "layertype_0_bsz1_seq2048 is -1; it must be a number"),
        (TIMES, dict.clear, "layertype_0 is profiled at []; it must be at 2 or more points"),
        (ALL_REDUCE, lambda d: d.update(allreduce_size_8_consec_1=0), "allreduce_size_8_consec_1 is 0; it must be a n"),
        (ALL_REDUCE, lambda d: d.pop("allreduce_size_4_consec_0"), "(allreduce_size_N_consec_0): degree 4 is not prof"),
        (P2P, lambda d: d.pop("pp_size_2"), "(pp_size_N): degree 2 is not profiled; profiled are [4, 8]"),
        (LATENCIES, lambda d: [d.pop(key) for key in list(d) if "all2all_size_4" in key], "(all2all_size): degree 4"),
        ("overlap_coefficient.json", lambda d: d.update(overlap_coe=0.5), "overlap_coe is 0.5; it must be a number fr"),
        ("spec.json", lambda d: d.pop("global_batch"), "spec.json: field 'global_batch' is missing"),
        ("spec.json", lambda d: d.update(chunk=7), "micro-batches is 7; it must divide the global batch of 64"),
        ("spec.json", lambda d: d.update(layers=True), "layers is True; it must be a whole number"),
        ("spec.json", lambda d: d.update(memory_gb=float("inf")), "memory_gb is inf; it must be a number"),
        ("spec.json", lambda d: d.update(seq=1024), "field '1024' is missing"),
        ("spec.json", lambda d: d.update(time_mode="guess"), "time_mode is 'guess'; it must be 'static' or 'batch' or"),
        ("spec.json", lambda d: d.update(async_grad_reduce=1), "async_grad_reduce is 1; it must be true or false"),
        ("spec.json", lambda d: d.update(gpus_per_node=6), "allreduce_bandwidth_1nodes_6gpus_per_node.json: No such f"),
    ],
)
def test_invalid_value_is_rejected_by_field(
    folder: Path, name: str, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    rewrite(folder / name, change)
    with pytest.raises(ProfileError) as refused:
        compare_with_galvatron(folder, MemoryLimitReading.NOMINAL)
    assert complaint in str(refused.value)


def test_missing_or_malformed_file_is_rejected_by_name(folder: Path) -> None:
    (folder / TIMES).write_text('{"a": ')
    with pytest.raises(ProfileError, match=f"{TIMES}: not JSON"):
        compare_with_galvatron(folder, MemoryLimitReading.NOMINAL)
    (folder / TIMES).unlink()
    with pytest.raises(ProfileError, match=f"{TIMES}: No such file or directory; it must be a readable file"):
        compare_with_galvatron(folder, MemoryLimitReading.NOMINAL)


def activations(memory: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = memory["layertype_0_sp"]["2048"]["tp_activation_per_bsz_dict"]
    return found
