"""Check that a script trains with the degrees of its plan.

The degrees are read from frameworks that the script has already loaded. Nothing is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_NAMES = ("tp", "pp", "dp", "cp", "ep")


def find_degrees() -> dict[str, int]:
    """Return the degrees that the loaded framework has set up, by the names of placeholders; empty if unknown."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        return {
            "tp": state.get_tensor_model_parallel_world_size(),
            "pp": state.get_pipeline_model_parallel_world_size(),
            "cp": state.get_context_parallel_world_size(),
            "dp": state.get_data_parallel_world_size(),
        }
    accelerate = sys.modules.get("accelerate.state")
    mesh = None if accelerate is None else accelerate.AcceleratorState._shared_state.get("parallelism_config")
    if mesh is not None:
        return {"tp": mesh.tp_size, "cp": mesh.cp_size, "dp": mesh.dp_replicate_size * mesh.dp_shard_size}
    return {}


def read_plan_degrees(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return the degrees of a plan document by the names of placeholders. Only `pp` if layers differ."""
    stages, interleave = plan["stages"], plan["schedule"]["interleave"]
    degrees = {"pp": max(1, len(stages) // interleave)}
    strategies = [strategy for stage in stages for strategy in stage["strategies"]]
    first = strategies[0]
    if all({**strategy, "layers": 0} == {**first, "layers": 0} for strategy in strategies):
        degrees |= {"tp": first["tp"], "dp": first["dp"], "cp": first["ulysses"] * first["ring"], "ep": first["ep"]}
    return degrees


def count_plan_ranks(plan: Mapping[str, Any]) -> int:
    """Return the number of ranks that a plan document needs."""
    stages, interleave = plan["stages"], plan["schedule"]["interleave"]
    return sum(int(stage["gpus"]) for stage in stages[: max(1, len(stages) // interleave)])


def find_degree_mismatch(plan: Mapping[str, Any], found: Mapping[str, int]) -> str:
    """Return which degrees differ from the plan's and what to do; empty if none does.

    Raises:
        ValueError: a name is no degree.
    """
    unknown = next((name for name in found if name not in _NAMES), None)
    if unknown is not None:
        raise ValueError(f"`{unknown}` is no degree. Use {', '.join(_NAMES)}.")
    planned = read_plan_degrees(plan)
    wrong = [name for name in found if name in planned and found[name] != planned[name]]
    if not wrong:
        return ""
    differences = ", ".join(f"{name} is {found[name]}, but the plan has {planned[name]}" for name in wrong)
    placeholders = ", ".join(f"{{plan.{name}}}" for name in wrong)
    return (
        f"The script ignores the plan of this generation: {differences}. "
        f"Pass {{plan.args}}, {{plan.file}} or {placeholders} to it in `command`."
    )
