"""Reads exported plans with the frameworks' own parsers. Runs in the environment of `make frameworks`.

Input: a JSON list of exports (`framework`, `args`, `file`, `world_size`, `layers`). Output: a JSON list with what each
parser made of it, in the terms of placeholders. It fails on an argument that a parser does not know.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import field, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

Case = dict[str, Any]


def parse_deepspeed(case: Case) -> dict[str, Any]:
    """Read with DeepSpeed's configuration class, and with Transformers' reader of the same file."""
    from deepspeed.runtime import config as module
    from transformers.integrations import HfDeepSpeedConfig

    document = json.loads(case["file"])
    tp = document.get("tensor_parallel", {}).get("autotp_size", 1)
    replicas = case["world_size"] // tp // document.get("sequence_parallel_size", 1)
    module.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda group=None: case["world_size"])
    known = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization"}
    unknown = document.keys() - known - {"tensor_parallel", "sequence_parallel_size", "data_parallel_size"}
    assert not unknown, f"DeepSpeed accepts unknown keys silently: {unknown}"
    parsed = module.DeepSpeedConfig(document, SimpleNamespace(get_data_parallel_world_size=lambda: replicas))
    reader = HfDeepSpeedConfig(document)
    assert reader.is_zero3() == (parsed.zero_config.stage == 3)
    return {
        "zero": int(parsed.zero_config.stage),
        "tp": max(1, parsed.tensor_parallel_config.autotp_size),
        "micro_batches": parsed.gradient_accumulation_steps,
        "global_batch": parsed.train_batch_size,
        "dp": replicas,
        "offload": parsed.zero_config.offload_optimizer is not None,
        "offload_parameters": parsed.zero_config.offload_param is not None,
    }


def parse_accelerate(case: Case) -> dict[str, Any]:
    """Read with the parser of `accelerate launch`, and with the mesh that the launched script builds."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accelerate.yaml"
        path.write_text(case["file"], encoding="utf-8")
        words = [str(path) if word == "{plan.file}" else word for word in case["args"]]
        args = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))[0]
    found: dict[str, Any] = {"world_size": args.num_processes, "zero": 0}
    if args.use_fsdp:
        found["zero"] = 3 if args.fsdp_reshard_after_forward in (True, "true") else 2
    if args.use_parallelism_config:
        variables = prepare_multi_gpu_env(args)
        os.environ.update({name: value for name, value in variables.items() if name.startswith("PARALLELISM_CONFIG")})
        mesh = ParallelismConfig()
        found |= {"tp": mesh.tp_size, "ring": mesh.cp_size, "dp": mesh.dp_replicate_size * mesh.dp_shard_size}
        found["total"] = mesh.total_size
    return found


def parse_torchtitan(case: Case) -> dict[str, Any]:
    """Read with torchtitan's ConfigManager and ParallelDims.

    Its models need triton, which exists for GPUs only. So the configuration has only the sections that are exported.
    """
    from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig

    sections = [
        ("training", TrainingConfig, field(default_factory=TrainingConfig)),
        ("parallelism", ParallelismConfig, field(default_factory=ParallelismConfig)),
        ("activation_checkpoint", ActivationCheckpointingConfig, field(default=None)),
        ("hf_assets_path", str, field(default=".")),
    ]
    registry = ModuleType("minimal_config")
    registry.__dict__["minimal"] = make_dataclass("Minimal", sections)
    sys.modules[registry.__name__] = registry
    config = ConfigManager().parse_args(["--module", registry.__name__, "--config", "minimal", *case["args"]])
    dims = ParallelDims.from_config(config.parallelism, case["world_size"])
    dp = dims.dp_replicate * dims.dp_shard
    samples = config.training.local_batch_size
    if dims.pp > 1:
        samples = config.parallelism.pipeline_parallel_microbatch_size
    policy = type(config.activation_checkpoint).__qualname__
    return {
        "tp": dims.tp, "pp": dims.pp, "dp": dp, "ring": dims.cp, "ep": dims.ep,
        "global_batch": config.training.global_batch_size,
        "micro_batches": config.training.global_batch_size // (samples * dp),
        "recompute": {"NoneType": "none", "SelectiveAC.Config": "selective", "FullAC.Config": "full"}[policy],
    }  # fmt: skip


def parse_megatron(case: Case) -> dict[str, Any]:
    """Read with Megatron's TransformerConfig. The wheel has no argument parser, so a recorded list is the parser."""
    from argparse import ArgumentParser

    from megatron.core.transformer.transformer_config import TransformerConfig

    recorded = (Path(__file__).with_name("megatron_arguments.txt")).read_text(encoding="utf-8").split()
    parser, switches = ArgumentParser(allow_abbrev=False), {"--sequence-parallel", "--use-distributed-optimizer"}
    for flag in dict.fromkeys(word for word in recorded if word.startswith("--")):
        if flag in switches:
            parser.add_argument(flag, action="store_true")
        elif flag == "--hierarchical-context-parallel-sizes":
            parser.add_argument(flag, nargs="+", type=int)
        else:
            parser.add_argument(flag)
    args = parser.parse_args(case["args"])
    tp, pp, cp = (
        int(getattr(args, f"{name}_size"))
        for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    chunk = args.num_layers_per_virtual_pipeline_stage
    config = TransformerConfig(
        num_layers=case["layers"],
        hidden_size=64 * tp * cp,
        num_attention_heads=8 * tp * cp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None if chunk is None else case["layers"] // pp // int(chunk),
        context_parallel_size=cp,
        cp_comm_type=args.cp_comm_type,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        sequence_parallel=args.sequence_parallel,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=None if args.recompute_num_layers is None else int(args.recompute_num_layers),
        pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
        pipeline_dtype=__import__("torch").bfloat16,
    )
    dp = case["world_size"] // (tp * pp * cp)
    return {
        "tp": config.tensor_model_parallel_size, "pp": config.pipeline_model_parallel_size, "dp": dp,
        "cp": config.context_parallel_size, "ep": int(args.expert_model_parallel_size),
        "interleave": config.virtual_pipeline_model_parallel_size or 1,
        "recompute": config.recompute_granularity or "none", "zero": int(args.use_distributed_optimizer),
        "micro_batches": int(args.global_batch_size) // (int(args.micro_batch_size) * dp),
    }  # fmt: skip


PARSERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "deepspeed": parse_deepspeed,
    "accelerate": parse_accelerate,
    "torchtitan": parse_torchtitan,
    "megatron-lm": parse_megatron,
}


def main() -> None:
    cases = json.load(sys.stdin)
    found = [PARSERS[case["framework"]](case) for case in cases]
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
