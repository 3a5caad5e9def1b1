"""The options of `plan`, in the groups that its help shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import inf
from typing import Annotated

import typer

_asked = partial(typer.Option, rich_help_panel="What to plan")
_files = partial(typer.Option, rich_help_panel="Dumped requests and other planners")


class Solver(StrEnum):
    EXACT = "exact"
    MILP = "milp"


class MemoryReading(StrEnum):
    NOMINAL = "nominal"
    KEPT_BACK = "kept-back"


@dataclass(frozen=True, slots=True)
class How:
    """Which solver, when it may end (the search at a proven ratio, the MILP at a time), and how many runners-up."""

    solver: Solver = Solver.EXACT
    tolerance: float = 0.0
    time_limit_s: float = inf
    alternatives: int = 0


ModelOption = Annotated[
    str | None, _asked("--model", metavar="NAME|FILE", help="A shipped model, or a profile's JSON.")
]
GpusOption = Annotated[str | None, _asked("--gpus", metavar="N|A:B", help="How many; A:B gives the whole curve.")]
GpuOption = Annotated[
    str | None, _asked("--gpu", metavar="NAME|FILE", help="Their model, or a profile's JSON; else a100-80g.")
]
NodesOption = Annotated[int | None, _asked("--nodes", min=1, help="Nodes to spread evenly over; else 8 GPUs a node.")]
ShapeOption = Annotated[
    str | None, _asked("--shape", metavar="FILE", help="Unlike nodes: a list of {gpu, nodes, gpus_per_node}.")
]
BatchOption = Annotated[int | None, _asked("--global-batch", min=1, max=1_000_000, help="Samples a step.")]
SeqOption = Annotated[
    int | None, _asked("--seq", min=0, max=100_000_000, help="Tokens a sample; else the model's own.")
]
FrozenOption = Annotated[
    int | None, _asked("--frozen-layers", metavar="K", min=0, help="So many of the first layers are not trained.")
]
MemoryOption = Annotated[str | None, _asked("--memory", metavar="24GB", help="What a plan may take of one GPU.")]
ToleranceOption = Annotated[
    float, typer.Option("--tolerance", min=0, max=0.999, help="End once no plan can be faster by this ratio.")
]
AlternativesOption = Annotated[int, typer.Option("--alternatives", min=0, max=10, help="How many runner-up plans.")]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="FILE.png|svg", help="Draw the curve; needs the extra 'plot'.")
]
DumpOption = Annotated[str | None, _files("--dump", metavar="FILE", help="Write the request as plain arrays.")]
LoadOption = Annotated[str | None, _files("--load", metavar="FILE", help="Solve a dumped request again.")]
SolverOption = Annotated[Solver, _files("--solver", help="The search, or UniAP's MILP; this needs the extra 'milp'.")]
TimeLimitOption = Annotated[float | None, _files("--time-limit", metavar="SECONDS", min=0, help="When milp gives up.")]
GalvatronOption = Annotated[
    str | None, _files("--galvatron", metavar="DIR", help="Plan a Galvatron profile under its own cost model.")
]
GalvatronPlanOption = Annotated[str | None, _files("--galvatron-plan", metavar="FILE", help="A plan of its to judge.")]
ReadingOption = Annotated[
    MemoryReading,
    _files("--memory-reading", help="Galvatron's memory cap as given, or less the 20% that it keeps back."),
]
