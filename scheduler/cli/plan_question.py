"""What `plan` is asked: a model, GPUs of one or two kinds, a batch; read from options and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.cli.failure import blaming, refuse
from scheduler.cli.humanise import size
from scheduler.cli.inputs import count_of, hardware_of, text_of, yaml_value_of
from scheduler.domain.spelling import meant

if TYPE_CHECKING:
    from scheduler.domain.gpu_shape import GpuShape
    from scheduler.solver.profiles.shipped import HardwareProfile, ModelProfile
    from scheduler.solver.request import SolveRequest

GPUS_MAX = 65_536
GPU_DEFAULT = "a100-80g"


@dataclass(frozen=True, slots=True)
class Question:
    """One model and batch on each of `shapes`. `memory_bytes` 0 is all that a GPU has."""

    model: ModelProfile
    hardware: tuple[HardwareProfile, ...]
    shapes: tuple[GpuShape, ...]
    is_curve: bool
    global_batch: int
    memory_bytes: int

    @property
    def limit_bytes(self) -> int:
        """What a plan may take of the largest GPU."""
        largest = max(profile.memory_bytes for profile in self.hardware)
        return min(self.memory_bytes or largest, largest)

    def request(self, shape: GpuShape) -> SolveRequest:
        from scheduler.solver.request import SolveRequest

        with blaming(""):
            return SolveRequest(self.model, self.hardware, shape, self.global_batch, self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Where:
    """The options that say on which GPUs; None where they were not given."""

    gpus: str | None
    gpu: str | None
    nodes: int | None
    shape: str | None


def question(where: Where, *, model: ModelProfile, global_batch: int, memory: str | None) -> Question:
    """The question that the options ask.

    Raises:
        BadInput: an option, or a file that it names, is not what it should be.
    """
    if where.shape is not None:
        hardware, shapes = _of_file(where, where.shape)
    else:
        hardware, shapes = _of_options(where)
    is_curve = where.shape is None and ":" in (where.gpus or "")
    memory_bytes = _memory_bytes(memory, hardware)
    return Question(model, hardware, shapes, is_curve, global_batch, memory_bytes)


def _of_file(where: Where, file: str) -> tuple[tuple[HardwareProfile, ...], tuple[GpuShape, ...]]:
    """Of a shape file; its GPUs are names or files of profiles, as those of --gpu."""
    from dataclasses import replace

    from scheduler.documents.plan_request import read_shape
    from scheduler.domain.gpu_shape import GpuShape

    for option in ("gpus", "gpu", "nodes"):
        if getattr(where, option) is not None:
            refuse(f"--{option}: {getattr(where, option)} does not go with --shape, which says it already")
    with blaming(f"--shape {file}"):
        shape = read_shape(yaml_value_of(file))
    profiles = {group.gpu: hardware_of(f"--shape {file}: gpu", group.gpu) for group in shape.groups}
    groups = tuple(replace(group, gpu=profiles[group.gpu].gpu) for group in shape.groups)
    return tuple(dict.fromkeys(profiles.values())), (GpuShape(groups),)


def _of_options(where: Where) -> tuple[tuple[HardwareProfile, ...], tuple[GpuShape, ...]]:
    hardware = hardware_of("--gpu", where.gpu or GPU_DEFAULT)
    if where.gpus is None:
        refuse("Missing option '--gpus': how many GPUs, as N or A:B (or --shape FILE)")
    least, colon, most = where.gpus.partition(":")
    if not colon:
        return (hardware,), (_shape(hardware.gpu, count_of("--gpus", where.gpus, most=GPUS_MAX), where.nodes),)
    if where.nodes is not None:
        refuse(f"--nodes: {where.nodes} does not go with the range --gpus {where.gpus}; give one number of GPUs")
    return (hardware,), _shapes(hardware.gpu, least, most)


def trained_model(name: str, *, seq: int, frozen_layers: int) -> ModelProfile:
    """The model that is asked about, with its first `frozen_layers` layers not trained.

    Raises:
        BadInput: there is no such model, or it cannot be of this sequence length or have so many frozen layers.
    """
    model = _model(name, seq)
    if frozen_layers > model.layer_count:
        refuse(f"--frozen-layers: {frozen_layers}; allowed are 0 to {model.layer_count}, the layers of {model.name}")
    return model.with_frozen(frozen_layers)


def _model(name: str, seq: int) -> ModelProfile:
    """A shipped model of this name, else the profile in this file."""
    from scheduler.solver.profiles.shipped import load_model, model_names, parse_model

    if name in model_names():
        with blaming("--model"):
            return load_model(name, seq)
    if not Path(name).is_file():
        known = model_names()
        refuse(f"--model: {name!r} is neither a file nor one of the models {', '.join(known)}{meant(name, known)}")
    with blaming(f"--model {name}"):
        return parse_model(text_of(name), seq)


def _memory_bytes(memory: str | None, hardware: tuple[HardwareProfile, ...]) -> int:
    from scheduler.documents.units import parse_bytes

    if memory is None:
        return 0
    with blaming("--memory"):
        memory_bytes = parse_bytes(memory)
    largest = max(hardware, key=lambda profile: profile.memory_bytes)
    if memory_bytes > largest.memory_bytes:
        refuse(f"--memory: {memory} is more than one {largest.gpu} has; allowed are up to {size(largest.memory_bytes)}")
    return memory_bytes


def _shape(gpu: str, gpus: int, nodes: int | None) -> GpuShape:
    from scheduler.documents.plan_request import GPUS_PER_NODE
    from scheduler.domain.gpu_shape import GpuGroup, GpuShape

    if nodes is None:
        return GpuShape.packed(gpu, gpus, GPUS_PER_NODE)
    if gpus % nodes:
        refuse(f"--nodes: {nodes} nodes cannot hold {gpus} GPUs evenly; allowed are divisors of {gpus}")
    return GpuShape((GpuGroup(gpu, nodes, gpus // nodes),))


def _shapes(gpu: str, least: str, most: str) -> tuple[GpuShape, ...]:
    """1 to 8 GPUs in a node, then whole nodes, of those from `least` to `most`."""
    from scheduler.documents.plan_request import GPUS_PER_NODE
    from scheduler.solver.curve import canonical_shapes

    low, high = (count_of("--gpus", bound, most=GPUS_MAX) for bound in (least, most))
    if high < low:
        refuse(f"--gpus: {low}:{high} is empty; allowed is A:B with A at most B")
    shapes = canonical_shapes(gpu, gpus_per_node=GPUS_PER_NODE, gpus_max=high)
    found = tuple(shape for shape in shapes if shape.gpus >= low)
    if not found:
        allowed = f"1 to {GPUS_PER_NODE} and multiples of {GPUS_PER_NODE}"
        refuse(f"--gpus: no curve point lies in {low}:{high}; allowed are {allowed}")
    return found
