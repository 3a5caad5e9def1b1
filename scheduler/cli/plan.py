"""`plan`: solve one plan, or a curve of them, in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.failure import Failed, blaming, refuse
from scheduler.cli.humanise import size, span
from scheduler.cli.inputs import count_of, text_of
from scheduler.cli.output import Format, OutputOption, emit
from scheduler.cli.plan_view import curve_view, plan_view

if TYPE_CHECKING:
    from scheduler.domain.gpu_shape import GpuShape
    from scheduler.solver.profiles.shipped import HardwareProfile, ModelProfile

GPUS_MAX = 65_536

ModelOption = Annotated[str, typer.Option("--model", metavar="NAME|FILE", help="A preset, or a model profile's JSON.")]
GpusOption = Annotated[str, typer.Option("--gpus", metavar="N|A:B", help="How many GPUs; A:B gives the whole curve.")]
GpuOption = Annotated[str, typer.Option("--gpu", metavar="NAME", help="Model of the GPUs.")]
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes to spread evenly over; else 8 a node.")]
BatchOption = Annotated[int, typer.Option("--global-batch", min=1, max=1_000_000, help="Samples a step.")]
SeqOption = Annotated[int, typer.Option("--seq", min=0, max=100_000_000, help="Tokens a sample; 0: the model's own.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", metavar="24GB", help="What a plan may take of one GPU.")]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about every shape. `memory_bytes` 0 is all that the GPU has."""

    model: ModelProfile
    hardware: HardwareProfile
    global_batch: int
    memory_bytes: int

    @property
    def limit_bytes(self) -> int:
        return self.memory_bytes or self.hardware.memory_bytes


def plan(
    *,
    model: ModelOption,
    gpus: GpusOption,
    global_batch: BatchOption,
    gpu: GpuOption = "a100-80g",
    nodes: NodesOption = None,
    seq: SeqOption = 0,
    memory: MemoryOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Find the fastest way to spread a model over GPUs, within their memory. Needs no service."""
    question = _question(model, gpu, seq=seq, global_batch=global_batch, memory=memory)
    least, colon, most = gpus.partition(":")
    if colon:
        if nodes is not None:
            refuse(f"--nodes: {nodes} does not go with the range --gpus {gpus}; give one number of GPUs")
        _print_curve(question, _shapes(gpu, least, most), output)
    else:
        _print_plan(question, _shape(gpu, count_of("--gpus", gpus, most=GPUS_MAX), nodes), output)


def _question(model: str, gpu: str, *, seq: int, global_batch: int, memory: str | None) -> Question:
    from scheduler.documents.units import parse_bytes
    from scheduler.solver.profiles.shipped import load_gpu

    with blaming("--gpu"):
        hardware = load_gpu(gpu)
    with blaming("--memory"):
        memory_bytes = 0 if memory is None else parse_bytes(memory)
    if memory_bytes > hardware.memory_bytes:
        refuse(f"--memory: {memory} is more than one {gpu} has; allowed are up to {size(hardware.memory_bytes)}")
    return Question(_model(model, seq), hardware, global_batch, memory_bytes)


def _model(name: str, seq: int) -> ModelProfile:
    """A preset of this name, else the profile in this file."""
    from scheduler.solver.profiles.shipped import load_model, model_names, parse_model

    if name in model_names():
        with blaming("--model"):
            return load_model(name, seq)
    if not Path(name).is_file():
        refuse(f"--model: {name!r} is neither a file nor one of the models {', '.join(model_names())}")
    with blaming(f"--model {name}"):
        return parse_model(text_of(name), seq)


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


def _solved(question: Question, shape: GpuShape) -> dict[str, Any]:
    """The plan for one shape in the contract's form, or `infeasible` and `constraint`; with what the search took."""
    from scheduler.domain.parallel_plan import plan_to_json
    from scheduler.solver.request import Infeasible, SolveRequest
    from scheduler.solver.search.search import search

    started_s = time.perf_counter()
    with blaming(""):
        request = SolveRequest(
            model=question.model,
            hardware=question.hardware,
            shape=shape,
            global_batch=question.global_batch,
            memory_bytes_max=question.memory_bytes,
        )
    outcome = search(request)
    took = {"search_time_s": time.perf_counter() - started_s, "candidates": outcome.report.candidates}
    if isinstance(outcome.result, Infeasible):
        return {"infeasible": outcome.result.reason, "constraint": outcome.result.constraint, **took}
    return {**plan_to_json(outcome.result), **took}


def _print_plan(question: Question, shape: GpuShape, output: Format) -> None:
    solved = _solved(question, shape)
    if "infeasible" in solved:
        if output is not Format.TABLE:
            emit(solved, output, lambda: "")
        raise Failed(f"no plan on {shape}: {solved['infeasible']}")
    found = f"in {span(solved['search_time_s'])}, {solved['candidates']:,} candidates"
    more = {"GPUs": str(shape), "found": found}
    emit(solved, output, lambda: plan_view(solved, memory_bytes=question.limit_bytes, more=more))


def _print_curve(question: Question, shapes: tuple[GpuShape, ...], output: Format) -> None:
    points = [{"gpus": shape.gpus, "shape": str(shape), **_solved(question, shape)} for shape in shapes]
    emit({"points": points}, output, lambda: curve_view(points, memory_bytes=question.limit_bytes))
    if all("infeasible" in point for point in points):
        raise Failed(f"no plan on any of {len(points)} shapes; on the largest: {points[-1]['infeasible']}")
