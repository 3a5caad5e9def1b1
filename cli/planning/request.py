"""The options of `plan`, in the groups that its help shows.

What `plan` is asked: a model, GPUs of one or two kinds, a batch; read from options and files.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    from scheduler.solver.profiles.catalog import HardwareProfile, ModelProfile
    from scheduler.solver.request import SolveRequest


_plan_option = partial(typer.Option, rich_help_panel="What to plan")
_file_option = partial(typer.Option, rich_help_panel="Dumped requests and other planners")


class Solver(StrEnum):
    EXACT = "exact"
    MILP = "milp"


class MemoryReading(StrEnum):
    NOMINAL = "nominal"
    KEPT_BACK = "kept-back"


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Which solver, when it may end (the search at a proven ratio, the MILP at a time), and how many runners-up."""

    solver: Solver = Solver.EXACT
    tolerance: float = 0.0
    time_limit_s: float = inf
    alternatives: int = 0


ModelOption = Annotated[
    str | None, _plan_option("--model", metavar="NAME|FILE", help="A shipped model, or a profile's JSON.")
]
GpusOption = Annotated[str | None, _plan_option("--gpus", metavar="N|A:B", help="How many; A:B gives the whole curve.")]
GpuOption = Annotated[
    str | None, _plan_option("--gpu", metavar="NAME|FILE", help="Their model, or a profile's JSON; else a100-80g.")
]
NodesOption = Annotated[
    int | None, _plan_option("--nodes", min=1, help="Nodes to spread evenly over; else 8 GPUs a node.")
]
ShapeOption = Annotated[
    str | None, _plan_option("--shape", metavar="FILE", help="Unlike nodes: a list of {gpu, nodes, gpus_per_node}.")
]
GlobalBatchOption = Annotated[int | None, _plan_option("--global-batch", min=1, max=1_000_000, help="Samples a step.")]
SequenceLengthOption = Annotated[
    int | None, _plan_option("--seq", min=0, max=100_000_000, help="Tokens a sample; else the model's own.")
]
FrozenLayersOption = Annotated[
    int | None, _plan_option("--frozen-layers", metavar="K", min=0, help="So many of the first layers are not trained.")
]
MemoryOption = Annotated[str | None, _plan_option("--memory", metavar="24GB", help="What a plan may take of one GPU.")]
ToleranceOption = Annotated[
    float, typer.Option("--tolerance", min=0, max=0.999, help="End once no plan can be faster by this ratio.")
]
AlternativesOption = Annotated[int, typer.Option("--alternatives", min=0, max=10, help="How many runner-up plans.")]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="FILE.png|svg", help="Draw the curve; needs the extra 'plot'.")
]
DumpOption = Annotated[str | None, _file_option("--dump", metavar="FILE", help="Write the request as plain arrays.")]
LoadOption = Annotated[str | None, _file_option("--load", metavar="FILE", help="Solve a dumped request again.")]
SolverOption = Annotated[
    Solver, _file_option("--solver", help="The search, or UniAP's MILP; this needs the extra 'milp'.")
]
TimeLimitOption = Annotated[
    float | None, _file_option("--time-limit", metavar="SECONDS", min=0, help="When milp gives up.")
]
GalvatronOption = Annotated[
    str | None, _file_option("--galvatron", metavar="DIR", help="Plan a Galvatron profile under its own cost model.")
]
GalvatronPlanOption = Annotated[
    str | None, _file_option("--galvatron-plan", metavar="FILE", help="A plan of its to judge.")
]
MemoryReadingOption = Annotated[
    MemoryReading,
    _file_option("--memory-reading", help="Galvatron's memory cap as given, or less the 20% that it keeps back."),
]


GPUS_MAX = 65_536
DEFAULT_GPU = "a100-80g"


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """One model and batch on each of `shapes`. `memory_bytes` 0 is all that a GPU has."""

    model: ModelProfile
    hardware: tuple[HardwareProfile, ...]
    shapes: tuple[GpuShape, ...]
    is_curve: bool
    global_batch: int
    memory_bytes: int

    @property
    def memory_limit_bytes(self) -> int:
        """What a plan may take of the largest GPU."""
        largest = max(profile.memory_bytes for profile in self.hardware)
        return min(self.memory_bytes or largest, largest)

    def build_request(self, shape: GpuShape) -> SolveRequest:
        from scheduler.solver.request import SolveRequest

        with input_errors_from(""):
            return SolveRequest(self.model, self.hardware, shape, self.global_batch, self.memory_bytes)


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """The options that say on which GPUs; None where they were not given."""

    gpus: str | None
    gpu: str | None
    nodes: int | None
    shape: str | None


def build_query(selection: GpuSelection, *, model: ModelProfile, global_batch: int, memory: str | None) -> PlanQuery:
    """The question that the options ask.

    Raises:
        BadInput: an option, or a file that it names, is not what it should be.
    """
    if selection.shape is not None:
        hardware, shapes = _select_from_file(selection, selection.shape)
    else:
        hardware, shapes = _select_from_options(selection)
    is_curve = selection.shape is None and ":" in (selection.gpus or "")
    memory_bytes = _parse_memory(memory, hardware)
    return PlanQuery(model, hardware, shapes, is_curve, global_batch, memory_bytes)


def _select_from_file(selection: GpuSelection, file: str) -> tuple[tuple[HardwareProfile, ...], tuple[GpuShape, ...]]:
    """Of a shape file; its GPUs are names or files of profiles, as those of --gpu."""
    from dataclasses import replace

    from scheduler.documents.plan_request import parse_gpu_shape
    from scheduler.domain.gpu_sets import GpuShape

    for option in ("gpus", "gpu", "nodes"):
        if getattr(selection, option) is not None:
            raise_input_error(
                f"--{option}: {getattr(selection, option)} does not go with --shape, which says it already"
            )
    with input_errors_from(f"--shape {file}"):
        shape = parse_gpu_shape(read_yaml(file))
    profiles = {group.gpu: load_hardware(f"--shape {file}: gpu", group.gpu) for group in shape.groups}
    groups = tuple(replace(group, gpu=profiles[group.gpu].gpu) for group in shape.groups)
    return tuple(dict.fromkeys(profiles.values())), (GpuShape(groups),)


def _select_from_options(selection: GpuSelection) -> tuple[tuple[HardwareProfile, ...], tuple[GpuShape, ...]]:
    hardware = load_hardware("--gpu", selection.gpu or DEFAULT_GPU)
    if selection.gpus is None:
        raise_input_error("Missing option '--gpus': how many GPUs, as N or A:B (or --shape FILE)")
    least, colon, most = selection.gpus.partition(":")
    if not colon:
        return (hardware,), (
            _build_shape(hardware.gpu, parse_count("--gpus", selection.gpus, maximum=GPUS_MAX), selection.nodes),
        )
    if selection.nodes is not None:
        raise_input_error(
            f"--nodes: {selection.nodes} does not go with the range --gpus {selection.gpus}; give one number of GPUs"
        )
    return (hardware,), _select_curve_shapes(hardware.gpu, least, most)


def load_trained_model(name: str, *, seq: int, frozen_layers: int) -> ModelProfile:
    """The model that is asked about, with its first `frozen_layers` layers not trained.

    Raises:
        BadInput: there is no such model, or it cannot be of this sequence length or have so many frozen layers.
    """
    model = _load_model(name, seq)
    if frozen_layers > model.layer_count:
        raise_input_error(
            f"--frozen-layers: {frozen_layers}; allowed are 0 to {model.layer_count}, the layers of {model.name}"
        )
    return model.with_frozen_layers(frozen_layers)


def _load_model(name: str, seq: int) -> ModelProfile:
    """A shipped model of this name, else the profile in this file."""
    from scheduler.solver.profiles.catalog import list_model_names, load_model, parse_model

    if name in list_model_names():
        with input_errors_from("--model"):
            return load_model(name, seq)
    if not Path(name).is_file():
        known = list_model_names()
        raise_input_error(
            f"--model: {name!r} is neither a file nor one of the models {', '.join(known)}{suggest(name, known)}"
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
        raise_input_error(
            f"--memory: {memory} is more than one {largest.gpu} has; allowed are up to {format_bytes(largest.memory_bytes)}"
        )
    return memory_bytes


def _build_shape(gpu: str, gpus: int, nodes: int | None) -> GpuShape:
    from scheduler.documents.plan_request import GPUS_PER_NODE
    from scheduler.domain.gpu_sets import GpuGroup, GpuShape

    if nodes is None:
        return GpuShape.packed(gpu, gpus, GPUS_PER_NODE)
    if gpus % nodes:
        raise_input_error(f"--nodes: {nodes} nodes cannot hold {gpus} GPUs evenly; allowed are divisors of {gpus}")
    return GpuShape((GpuGroup(gpu, nodes, gpus // nodes),))


def _select_curve_shapes(gpu: str, minimum: str, maximum: str) -> tuple[GpuShape, ...]:
    """1 to 8 GPUs in a node, then whole nodes, of those from `least` to `most`."""
    from scheduler.documents.plan_request import GPUS_PER_NODE
    from scheduler.solver.curve import list_canonical_shapes

    low, high = (parse_count("--gpus", bound, maximum=GPUS_MAX) for bound in (minimum, maximum))
    if high < low:
        raise_input_error(f"--gpus: {low}:{high} is empty; allowed is A:B with A at most B")
    shapes = list_canonical_shapes(gpu, gpus_per_node=GPUS_PER_NODE, gpus_max=high)
    found = tuple(shape for shape in shapes if shape.gpus >= low)
    if not found:
        allowed = f"1 to {GPUS_PER_NODE} and multiples of {GPUS_PER_NODE}"
        raise_input_error(f"--gpus: no curve point lies in {low}:{high}; allowed are {allowed}")
    return found
