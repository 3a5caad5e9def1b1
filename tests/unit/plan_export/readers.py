"""Readers of exports, written from each framework's documentation and not from the exporters.

Each returns what the export says, in the terms of `LayerStrategy` and `ParallelPlan`. They refuse keys that they do not
know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import yaml

from scheduler.plan_export.framework import PLAN_FILE, ExportedPlan

Said = dict[str, Any]

MEGATRON_VALUES = {
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--expert-model-parallel-size", "--micro-batch-size", "--global-batch-size", "--cp-comm-type",
    "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
    "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout",
}  # fmt: skip


def read_megatron(exported: ExportedPlan, world_size: int) -> Said:
    said, words = dict[str, Any](), list(exported.args)
    sizes: list[int] = []
    while words:
        word = words.pop(0)
        if word == "--hierarchical-context-parallel-sizes":
            sizes = [int(words.pop(0)), int(words.pop(0))]
        elif word in MEGATRON_VALUES:
            said[word] = words.pop(0)
        else:
            assert word in ("--sequence-parallel", "--use-distributed-optimizer"), word
            said[word] = True
    tp, pp, cp = (
        int(said[f"--{name}-size"]) for name in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    )
    dp = world_size // (tp * pp * cp)
    kind = said.get("--cp-comm-type")
    ulysses, ring = {None: (1, 1), "a2a": (cp, 1), "p2p": (1, cp), "a2a+p2p": tuple(sizes or (0, 0))}[kind]
    batch, chunk = int(said["--global-batch-size"]), said.get("--num-layers-per-virtual-pipeline-stage")
    layout = said.get("--pipeline-model-parallel-layout", "")
    return {
        "pp": pp, "tp": tp, "dp": dp, "ulysses": ulysses, "ring": ring,
        "ep": int(said["--expert-model-parallel-size"]),
        "sequence_sharding": "--sequence-parallel" in said,
        "zero": int("--use-distributed-optimizer" in said),
        "recompute": said.get("--recompute-granularity", "none"),
        "global_batch": batch,
        "micro_batches": batch // (int(said["--micro-batch-size"]) * dp),
        "length": None if chunk is None else int(chunk),
        "lengths": [int(count) for count in re.findall(r"t\*(\d+)", layout)] or None,
    }  # fmt: skip


def read_deepspeed(exported: ExportedPlan, world_size: int) -> Said:
    assert exported.file is not None
    config = json.loads(exported.file.text)
    zero, tp = config.pop("zero_optimization"), config.pop("tensor_parallel", {"autotp_size": 1})["autotp_size"]
    ulysses = config.pop("sequence_parallel_size", 1)
    steps, batch = config.pop("gradient_accumulation_steps"), config.pop("train_batch_size")
    samples = config.pop("train_micro_batch_size_per_gpu")
    dp = world_size // tp // ulysses
    assert config == ({"data_parallel_size": dp} if ulysses > 1 else {})
    assert batch == samples * steps * dp, "DeepSpeed refuses other batches"
    return {
        "pp": 1, "tp": tp, "dp": dp, "ulysses": ulysses, "zero": zero["stage"], "global_batch": batch,
        "micro_batches": steps, "offload": "offload_optimizer" in zero, "offload_parameters": "offload_param" in zero,
    }  # fmt: skip


def read_llama_factory(exported: ExportedPlan, world_size: int) -> Said:
    overrides = dict(word.split("=", 1) for word in exported.args)
    assert overrides.pop("deepspeed") == PLAN_FILE
    said = read_deepspeed(exported, world_size)
    assert int(overrides.pop("gradient_accumulation_steps")) == said["micro_batches"]
    samples = int(overrides.pop("per_device_train_batch_size"))
    assert samples * said["micro_batches"] * said["dp"] == said["global_batch"]
    is_off = overrides.pop("disable_gradient_checkpointing") == "true"
    assert overrides == {}
    return {**said, "recompute": "none" if is_off else "full"}


def read_accelerate(exported: ExportedPlan, world_size: int) -> Said:
    assert exported.file is not None
    config = yaml.safe_load(exported.file.text)
    assert exported.args == ("--config_file", PLAN_FILE)
    mesh = config.get("parallelism_config")
    kind, fsdp = config["distributed_type"], config.get("fsdp_config")
    assert config["num_processes"] == world_size
    assert (kind == "FSDP") == (fsdp is not None)
    said: Said = {"pp": 1, "zero": 0, "tp": 1, "ring": 1, "dp": world_size}
    if mesh is not None:
        sizes = {name.removeprefix("parallelism_config_"): value for name, value in mesh.items()}
        replicated, sharded, tp, cp = (sizes[f"{each}_size"] for each in ("dp_replicate", "dp_shard", "tp", "cp"))
        assert replicated * sharded * tp * cp == world_size
        said |= {"tp": tp, "ring": cp, "dp": replicated * sharded, "shard_group": sharded * cp}
    if fsdp is not None:
        said["zero"] = 3 if fsdp["fsdp_reshard_after_forward"] else 2
    return said


def read_torchtitan(exported: ExportedPlan, world_size: int) -> Said:
    *words, subcommand = exported.args
    said: Said = {"sequence_sharding": None, "recompute": subcommand.removeprefix("activation-checkpoint:")}
    flags = dict[str, str]()
    while words:
        word = words.pop(0)
        if word == "--parallelism.no-enable_sequence_parallel":
            said["sequence_sharding"] = False
        else:
            flags[word.removeprefix("--").removeprefix("parallelism.")] = words.pop(0)
    replicated, sharded = int(flags.pop("data_parallel_replicate_degree")), int(flags.pop("data_parallel_shard_degree"))
    tp, cp = int(flags.pop("tensor_parallel_degree")), int(flags.pop("context_parallel_degree"))
    pp = int(flags.pop("pipeline_parallel_degree"))
    assert replicated * sharded * cp * tp * pp == world_size
    dp, local = replicated * sharded, int(flags.pop("training.local_batch_size"))
    batch = int(flags.pop("training.global_batch_size"))
    samples = int(flags.pop("pipeline_parallel_microbatch_size", local))
    said["lengths"] = None
    if pp > 1:
        said["length"] = int(flags.pop("pipeline_parallel_layers_per_stage"))
        assert (
            flags.pop("pipeline_parallel_first_stage_less_layers"),
            flags.pop("pipeline_parallel_last_stage_less_layers"),
        ) == ("0", "0")
        said["interleaved"] = flags.pop("pipeline_parallel_schedule") == "Interleaved1F1B"
        assert local * dp == batch, "a step is one local batch"
    reshard = flags.pop("fsdp_reshard_after_forward", None)
    said |= {
        "pp": pp, "tp": tp, "dp": dp, "ring": cp, "ep": int(flags.pop("expert_parallel_degree")), "global_batch": batch,
        "micro_batches": batch // (samples * dp), "zero": {None: 0, "never": 2, "always": 3}[reshard],
    }  # fmt: skip
    if reshard is not None:
        said["shard_group"] = sharded * cp
    assert flags == {}
    return said


def read_colossalai(exported: ExportedPlan, world_size: int) -> Said:
    assert exported.file is not None
    config = json.loads(exported.file.text)
    tp, pp = config.pop("tp_size"), config.pop("pp_size")
    said: Said = {"tp": tp, "pp": pp, "zero": config.pop("zero_stage"), "ulysses": 1, "ring": 1}
    mode, size = config.pop("sequence_parallelism_mode", None), config.pop("sp_size", 1)
    assert config.pop("enable_sequence_parallelism", False) == (mode is not None)
    said["sequence_sharding"] = mode == "split_gather"
    if mode in ("all_to_all", "ring_attn"):
        said[{"all_to_all": "ulysses", "ring_attn": "ring"}[mode]] = size
    said["dp"] = world_size // (tp * pp * size)
    if pp > 1:
        said["samples"], chunks = config.pop("microbatch_size"), config.pop("num_model_chunks")
        assert config.pop("pp_style") == ("interleaved" if chunks > 1 else "1f1b")
        said |= {"interleave": chunks, "lengths": config.pop("num_layers_per_stage", None)}
    assert config == {}
    return said


def read_galvatron(exported: ExportedPlan, world_size: int) -> Said:
    assert exported.file is not None
    assert exported.args[:2] == ("--galvatron_config_path", PLAN_FILE)
    config = json.loads(exported.file.text)
    pp = config["pp_deg"]
    sizes, ulysses = _split(config["tp_sizes_enc"]), _split(config["use_sp"])
    sharded, recomputed = _split(config["dp_types_enc"]), _split(config["checkpoint"])
    assert set(_split(config["tp_consecutive_flags"])) == {1}
    layers = [
        {
            "tp": 1 if is_ulysses else size,
            "ulysses": size if is_ulysses else 1,
            "dp": world_size // pp // size,
            "zero": 3 if is_sharded else 2,
            "recompute": "full" if is_recomputed else "none",
        }
        for size, is_ulysses, is_sharded, is_recomputed in zip(sizes, ulysses, sharded, recomputed, strict=True)
    ]
    return {
        "pp": pp, "layers": layers, "lengths": _split(config["pp_division"]), "global_batch": config["global_bsz"],
        "micro_batches": config["chunks"],
    }  # fmt: skip


def _split(text: str | Iterable[int]) -> list[int]:
    return [int(each) for each in str(text).split(",")]


READERS: dict[str, Callable[[ExportedPlan, int], Said]] = {
    "megatron-lm": read_megatron,
    "deepspeed": read_deepspeed,
    "torchtitan": read_torchtitan,
    "accelerate": read_accelerate,
    "galvatron": read_galvatron,
    "colossalai": read_colossalai,
    "llama-factory": read_llama_factory,
}
