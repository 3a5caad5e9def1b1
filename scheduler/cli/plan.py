"""`plan`: solve one plan, a curve of them, a dumped request or a Galvatron profile, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from scheduler.cli import plan_options as options
from scheduler.cli.failure import Failed, refuse
from scheduler.cli.output import Format, OutputOption, emit, say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.cli.plan_question import Question


def plan(
    *,
    model: options.ModelOption = None,
    gpus: options.GpusOption = None,
    global_batch: options.BatchOption = None,
    gpu: options.GpuOption = None,
    nodes: options.NodesOption = None,
    shape: options.ShapeOption = None,
    seq: options.SeqOption = None,
    frozen_layers: options.FrozenOption = None,
    memory: options.MemoryOption = None,
    tolerance: options.ToleranceOption = 0.0,
    alternatives: options.AlternativesOption = 3,
    plot: options.PlotOption = None,
    dump: options.DumpOption = None,
    load: options.LoadOption = None,
    solver: options.SolverOption = options.Solver.EXACT,
    time_limit: options.TimeLimitOption = None,
    galvatron: options.GalvatronOption = None,
    galvatron_plan: options.GalvatronPlanOption = None,
    memory_reading: options.ReadingOption = options.MemoryReading.KEPT_BACK,
    output: OutputOption = Format.TABLE,
) -> None:
    """Find the fastest way to spread a model over GPUs, within their memory. Needs no service."""
    asked = {"model": model, "gpus": gpus, "gpu": gpu, "nodes": nodes, "shape": shape, "global-batch": global_batch}
    asked |= {"seq": seq, "frozen-layers": frozen_layers, "memory": memory, "plot": plot, "dump": dump}
    how = options.How(solver, tolerance, inf if time_limit is None else time_limit, alternatives)
    if galvatron is not None:
        _refuse_beside("--galvatron", {**asked, "load": load})
        _print_galvatron(galvatron, galvatron_plan, memory_reading, output)
    elif galvatron_plan is not None:
        refuse(f"--galvatron-plan: {galvatron_plan} needs --galvatron DIR, the profile that judges it")
    elif load is not None:
        _refuse_beside("--load", asked)
        _print_file(load, how, output)
    else:
        _print_request(_question(asked), how, plot=plot, dump=dump, output=output)


def _refuse_beside(option: str, others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            refuse(f"--{name}: {value} does not go with {option}, which says all that is asked")


def _question(asked: Mapping[str, Any]) -> Question:
    from scheduler.cli.plan_question import Where, question, trained_model

    for needed in ("model", "global-batch"):
        if asked[needed] is None:
            refuse(f"Missing option '--{needed}'")
    where = Where(**{name: asked[name] for name in ("gpus", "gpu", "nodes", "shape")})
    model = trained_model(asked["model"], seq=asked["seq"] or 0, frozen_layers=asked["frozen-layers"] or 0)
    return question(where, model=model, global_batch=asked["global-batch"], memory=asked["memory"])


def _print_request(question: Question, how: options.How, *, plot: str | None, dump: str | None, output: Format) -> None:
    if not question.is_curve:
        if plot is not None:
            refuse(f"--plot: {plot} needs a curve; allowed is a range --gpus A:B")
        _print_plan(question, how, dump, output)
    elif dump is not None or how.solver is not options.Solver.EXACT:
        refuse("--gpus: a range goes with neither --dump nor --solver milp; give one number of GPUs")
    else:
        _print_curve(question, how, plot, output)


def _print_plan(question: Question, how: options.How, dump: str | None, output: Format) -> None:
    from scheduler.cli.plan_view import plan_view

    request = question.request(question.shapes[0])
    if dump is not None:
        from scheduler.cli.plan_instances import write_instances

        say(f"{write_instances(request, dump)} instances written to {dump}")
    if how.solver is options.Solver.MILP:
        from scheduler.cli.plan_instances import solved_by_milp

        answer = solved_by_milp(request, how)
    else:
        from scheduler.cli.plan_solving import solved

        answer = solved(request, tolerance=how.tolerance, alternatives=how.alternatives)
    shape = str(request.shape)
    _emit_or_fail(answer, output, f"no plan on {shape}", lambda: plan_view(answer, shape=shape))


def _print_curve(question: Question, how: options.How, plot: str | None, output: Format) -> None:
    from scheduler.cli.curve_plot import Picture
    from scheduler.cli.curve_view import curve_view
    from scheduler.cli.plan_solving import solved_curve

    title = f"{question.model.name} on {question.hardware[0].gpu}, {question.global_batch} samples a step"
    picture = None if plot is None else Picture(plot, title)
    points = solved_curve(question, tolerance=how.tolerance)
    emit({"points": points}, output, lambda: curve_view(points, memory_bytes=question.limit_bytes))
    if all("infeasible" in point for point in points):
        raise Failed(f"no plan on any of {len(points)} shapes; on the largest: {_why(points[-1])}")
    if picture is not None:
        picture.draw(points)
        say(f"the curve is drawn in {plot}")


def _print_file(file: str, how: options.How, output: Format) -> None:
    from scheduler.cli.plan_instances import solved_file
    from scheduler.cli.solution_view import solution_view

    answer = solved_file(file, how)
    _emit_or_fail(answer, output, f"{file}: no solution", lambda: solution_view(answer))


def _print_galvatron(folder: str, plan_file: str | None, reading: options.MemoryReading, output: Format) -> None:
    from scheduler.cli.galvatron_view import galvatron_view
    from scheduler.cli.plan_galvatron import solved_galvatron

    answer = solved_galvatron(folder, plan_file, reading)
    emit(answer, output, lambda: galvatron_view(answer))
    if "infeasible" in answer:
        raise Failed(f"no plan for {folder}: {answer['infeasible']}")


def _emit_or_fail(answer: Mapping[str, Any], output: Format, failure: str, view: Callable[[], RenderableType]) -> None:
    """Prints the answer; where there is none, people get the reason alone, and programs get both."""
    if "infeasible" not in answer:
        emit(answer, output, view)
        return
    if output is not Format.TABLE:
        emit(answer, output, view)
    raise Failed(f"{failure}: {_why(answer)}")


def _why(answer: Mapping[str, Any]) -> str:
    """The reason on lines of its own: what binds, and the smallest change that would help."""
    needs, _, change = answer["infeasible"].rpartition("; ")
    lines = [needs, f"  change: {change}"] if needs else [change]
    return "\n".join([lines[0], f"  binding: {answer['constraint']}", *lines[1:]])
