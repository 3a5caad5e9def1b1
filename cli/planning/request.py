"""Options of `ebbtide plan`, and the query (model, GPU shapes, global batch) that they describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.inputs import input_errors_from, load_hardware, parse_count, raise_input_error, read_text, read_yaml
from cli.output import format_bytes
from scheduler.domain.suggestions import suggest

if TYPE_CHECKING:
    from scheduler.domain.gpu_sets import GpuShape
    from scheduler.domain.plan_limits import PlanLimits
    from scheduler.solver.profiles.catalog import HardwareProfile, ModelProfile
    from scheduler.solver.request import SolveRequest


_plan_option = partial(typer.Option, rich_help_panel="Request")
_file_option = partial(typer.Option, rich_help_panel="Solver instances and baselines")


class Solver(StrEnum):
    EXACT = "exact"
    MILP = "milp"


class MemoryReading(StrEnum):
    NOMINAL = "nominal"
    KEPT_BACK = "kept-back"


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Options of the solver.

    `tolerance` is the proven optimality gap at which the search stops, `time_limit_s` the time after which the MILP
    stops, `alternatives` the number of runner-up plans, `simplicity` the ratio by which a simpler plan may be slower.
    """

    solver: Solver = Solver.EXACT
    tolerance: float = 0.0
    time_limit_s: float = inf
    alternatives: int = 0
    simplicity: float = 0.0


ModelOption = Annotated[
    str | None,
    _plan_option(
        "--model", metavar="NAME|FILE", help="Model preset, or file with a profile or a Hugging Face config.json."
    ),
]
GpusOption = Annotated[
    str | None, _plan_option("--gpus", metavar="N|A:B", help="Number of GPUs, or A:B for a scaling curve.")
]
GpuOption = Annotated[
    str | None, _plan_option("--gpu", metavar="NAME|FILE", help="GPU model or profile file (JSON). Default: a100-80g.")
]
NodesOption = Annotated[int | None, _plan_option("--nodes", min=1, help="Number of nodes. Default: 8 GPUs per node.")]
ShapeOption = Annotated[
    str | None,
    _plan_option("--shape", metavar="FILE", help="Heterogeneous GPUs: a list of {gpu, nodes, gpus_per_node}."),
]
GlobalBatchOption = Annotated[
    int | None, _plan_option("--global-batch", min=1, max=1_000_000, help="Samples per step.")
]
SequenceLengthOption = Annotated[
    int | None, _plan_option("--seq", min=0, max=100_000_000, help="Tokens per sample. Default: that of the model.")
]
FrozenLayersOption = Annotated[
    int | None, _plan_option("--frozen-layers", metavar="K", min=0, help="Number of frozen layers, from the first.")
]
MemoryOption = Annotated[
    str | None,
    _plan_option(
        "--memory", metavar="24GB", help="Memory that a plan may use per GPU, such as 24GB. Default: all of it."
    ),
]
HostMemoryOption = Annotated[
    str | None,
    _plan_option(
        "--host-memory",
        metavar="60GB",
        help="Host memory that a plan may use per GPU, also to stream parameters and activations if nothing else fits. "
        "Default: that of the GPU profile, or no limit without one.",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    _plan_option(
        "--only", metavar="DIMENSION", help="Dimensions that the plan may use, such as tensor,data,fsdp. Repeatable."
    ),
]
WithoutOption = Annotated[
    list[str] | None,
    _plan_option("--without", metavar="DIMENSION", help="Dimensions that the plan may not use. Repeatable."),
]
ForOption = Annotated[
    str | None,
    _plan_option(
        "--for",
        metavar="FRAMEWORK",
        help="Search only plans that a training framework can run, and print the plan in its words: megatron-lm, "
        "deepspeed, torchtitan, accelerate, galvatron, colossalai or llama-factory.",
    ),
]
PriceOption = Annotated[
    str | None,
    _plan_option(
        "--price",
        metavar="PLAN.json",
        help="Predict the step of your own plan, check that it can run, and compare it with the fastest.",
    ),
]
SimplicityOption = Annotated[
    float | None,
    typer.Option(
        "--simplicity",
        min=0,
        max=1,
        help="Also show the plan with the fewest different strategies that is at most this fraction slower. "
        "Default: 0.02.",
    ),
]
ToleranceOption = Annotated[
    float, typer.Option("--tolerance", min=0, max=0.999, help="Stop at this proven optimality gap.")
]
AlternativesOption = Annotated[
    int, typer.Option("--alternatives", min=0, max=10, help="Number of runner-up plans to show.")
]
PlotOption = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE.html|png|svg",
        help="Draw the scaling curve. Pictures require the extra 'plot'; an HTML page is interactive.",
    ),
]
DumpOption = Annotated[
    str | None, _file_option("--dump", metavar="FILE", help="Write the request as solver instances (JSON).")
]
LoadOption = Annotated[str | None, _file_option("--load", metavar="FILE", help="Solve a request written by --dump.")]
SolverOption = Annotated[Solver, _file_option("--solver", help="Exact search, or the UniAP MILP (extra 'milp').")]
TimeLimitOption = Annotated[
    float | None,
    _file_option(
        "--time-limit",
        metavar="SECONDS",
        min=0,
        help="Stop the MILP solver after this time and use its best plan so far.",
    ),
]
GalvatronOption = Annotated[
    str | None,
    _file_option("--galvatron", metavar="DIR", help="Plan a Galvatron profile under Galvatron's cost model."),
]
GalvatronPlanOption = Annotated[
    str | None,
    _file_option("--galvatron-plan", metavar="FILE", help="Plan file (JSON) of Galvatron to compare with our plan."),
]
MemoryReadingOption = Annotated[
    MemoryReading,
    _file_option("--memory-reading", help="Galvatron's memory limit as given, or less the 20% that it reserves."),
]


GPUS_MAX = 65_536
DEFAULT_GPU = "a100-80g"


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """One model and global batch, to plan on each of `shapes`. `memory_bytes` 0 means all of a GPU's memory.

    `limits` are the user's own. A `framework` adds those of what it can run.
    """

    model: ModelProfile
    hardware: tuple[HardwareProfile, ...]
    shapes: tuple[GpuShape, ...]
    is_curve: bool
    global_batch: int
    memory_bytes: int
    limits: PlanLimits
    framework: str = ""

    @property
    def memory_limit_bytes(self) -> int:
        """The memory that a plan may use on the GPU with the most memory."""
        largest = max(profile.memory_bytes for profile in self.hardware)
        return min(self.memory_bytes or largest, largest)

    def build_request(self, shape: GpuShape) -> SolveRequest:
        from scheduler.domain.framework_limits import combine_framework_limits
        from scheduler.solver.request import SolveRequest

        limits = combine_framework_limits(self.framework, self.limits)
        with input_errors_from(""):
            return SolveRequest(self.model, self.hardware, shape, self.global_batch, self.memory_bytes, limits=limits)


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """The options that select GPUs; None if not given."""

    gpus: str | None
    gpu: str | None
    nodes: int | None
    shape: str | None


def build_query(
    selection: GpuSelection,
    *,
    model: ModelProfile,
    global_batch: int,
    memory: str | None,
    host_memory: str | None,
    limits: PlanLimits,
) -> PlanQuery:
    """Return the query that the options describe.

    Raises:
        InputError: an option or a file that it names is invalid.
    """
    if selection.shape is not None:
        hardware, shapes = _select_from_file(selection, selection.shape)
    else:
        hardware, shapes = _select_from_options(selection)
    is_curve = selection.shape is None and ":" in (selection.gpus or "")
    memory_bytes = _parse_memory(memory, hardware)
    if host_memory is not None:
        host_bytes = _parse_host_memory(host_memory)
        hardware = tuple(profile.with_host_memory(host_bytes) for profile in hardware)
    return PlanQuery(model, hardware, shapes, is_curve, global_batch, memory_bytes, limits)


def _select_from_file(selection: GpuSelection, file: str) -> tuple[tuple[HardwareProfile, ...], tuple[GpuShape, ...]]:
    """Return the profiles and the shape in a shape file, whose GPUs are names or profile files as in --gpu."""

    from scheduler.documents.plan_request import parse_gpu_shape
    from scheduler.domain.gpu_sets import GpuShape

    for option in ("gpus", "gpu", "nodes"):
        if getattr(selection, option) is not None:
            raise_input_error(
                f"--{option}: {getattr(selection, option)} cannot be combined with --shape, which defines it"
            )
    with input_errors_from(f"--shape {file}"):
        shape = parse_gpu_shape(read_yaml(file))
    profiles = {group.gpu: load_hardware(f"--shape {file}: gpu", group.gpu) for group in shape.groups}
    groups = tuple(replace(group, gpu=profiles[group.gpu].gpu) for group in shape.groups)
    return tuple(dict.fromkeys(profiles.values())), (GpuShape(groups),)


def _select_from_options(selection: GpuSelection) -> tuple[tuple[HardwareProfile, ...], tuple[GpuShape, ...]]:
    hardware = load_hardware("--gpu", selection.gpu or DEFAULT_GPU)
    if selection.gpus is None:
        raise_input_error("Missing option '--gpus'. Use --gpus N, --gpus A:B or --shape FILE.")
    least, colon, most = selection.gpus.partition(":")
    if not colon:
        return (hardware,), (
            _build_shape(hardware.gpu, parse_count("--gpus", selection.gpus, maximum=GPUS_MAX), selection.nodes),
        )
    if selection.nodes is not None:
        raise_input_error(
            f"--nodes: {selection.nodes} needs one number of GPUs, but --gpus is the range {selection.gpus}."
        )
    return (hardware,), _select_curve_shapes(hardware.gpu, least, most)


def load_trained_model(name: str, *, seq: int, frozen_layers: int) -> ModelProfile:
    """Return the model with its first `frozen_layers` layers frozen.

    Raises:
        InputError: the model is unknown, or the sequence length or number of frozen layers is invalid for it.
    """
    model = _load_model(name, seq)
    if frozen_layers > model.layer_count:
        raise_input_error(
            f"--frozen-layers: {frozen_layers} is out of range. {model.name} has {model.layer_count} layers."
        )
    return model.with_frozen_layers(frozen_layers)


def _load_model(name: str, seq: int) -> ModelProfile:
    """Return the model preset of this name, else the profile in the file `name`."""
    from scheduler.solver.profiles.catalog import list_model_names, load_model, parse_model

    if name in list_model_names():
        with input_errors_from("--model"):
            return load_model(name, seq)
    if not Path(name).is_file():
        known = list_model_names()
        raise_input_error(
            f"--model: {name!r} is neither a file nor a known model ({', '.join(known)}){suggest(name, known)}"
        )
    with input_errors_from(f"--model {name}"):
        return parse_model(read_text(name), seq)


def _parse_memory(memory: str | None, hardware: tuple[HardwareProfile, ...]) -> int:
    from scheduler.documents.units import parse_bytes

    if memory is None:
        return 0
    with input_errors_from("--memory"):
        memory_bytes = parse_bytes(memory)
    largest = max(hardware, key=lambda profile: profile.memory_bytes)
    if memory_bytes > largest.memory_bytes:
        raise_input_error(f"--memory: {memory} exceeds the {format_bytes(largest.memory_bytes)} of one {largest.gpu}")
    return memory_bytes


def _parse_host_memory(host_memory: str) -> int:
    from scheduler.documents.units import parse_bytes

    with input_errors_from("--host-memory"):
        host_bytes = parse_bytes(host_memory)
    if not host_bytes:
        raise_input_error(f"--host-memory: {host_memory} is 0. Use --without offload for plans without host memory.")
    return host_bytes


def _build_shape(gpu: str, gpus: int, nodes: int | None) -> GpuShape:
    from scheduler.documents.plan_request import GPUS_PER_NODE
    from scheduler.domain.gpu_sets import GpuGroup, GpuShape

    if nodes is None:
        return GpuShape.packed(gpu, gpus, GPUS_PER_NODE)
    if gpus % nodes:
        raise_input_error(f"--nodes: {nodes} cannot hold {gpus} GPUs evenly. Use a divisor of {gpus}.")
    return GpuShape((GpuGroup(gpu, nodes, gpus // nodes),))


def _select_curve_shapes(gpu: str, minimum: str, maximum: str) -> tuple[GpuShape, ...]:
    """Return the canonical shapes (1 to 8 GPUs in a node, then whole nodes) in the range of GPUs."""
    from scheduler.documents.plan_request import GPUS_PER_NODE
    from scheduler.solver.curve import list_canonical_shapes

    low, high = (parse_count("--gpus", bound, maximum=GPUS_MAX) for bound in (minimum, maximum))
    if high < low:
        raise_input_error(f"--gpus: {low}:{high} is empty. Use A:B with A not above B.")
    shapes = list_canonical_shapes(gpu, gpus_per_node=GPUS_PER_NODE, gpus_max=high)
    found = tuple(shape for shape in shapes if shape.gpus >= low)
    if not found:
        allowed = f"1 to {GPUS_PER_NODE} and multiples of {GPUS_PER_NODE}"
        raise_input_error(f"--gpus: no point of the scaling curve lies in {low}:{high}. Points are {allowed}.")
    return found
