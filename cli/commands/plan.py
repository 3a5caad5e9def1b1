"""`ebbtide plan`: solves one plan, a scaling curve, a dumped request or a Galvatron profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from cli.exit_codes import CommandError
from cli.inputs import raise_input_error
from cli.output import OutputFormat, OutputOption, print_document, print_message
from cli.planning import request as options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cli.planning.request import PlanQuery


def plan(
    *,
    model: options.ModelOption = None,
    gpus: options.GpusOption = None,
    global_batch: options.GlobalBatchOption = None,
    gpu: options.GpuOption = None,
    nodes: options.NodesOption = None,
    shape: options.ShapeOption = None,
    seq: options.SequenceLengthOption = None,
    frozen_layers: options.FrozenLayersOption = None,
    memory: options.MemoryOption = None,
    host_memory: options.HostMemoryOption = None,
    only: options.OnlyOption = None,
    without: options.WithoutOption = None,
    framework: options.ForOption = None,
    price: options.PriceOption = None,
    simplicity: options.SimplicityOption = None,
    tolerance: options.ToleranceOption = 0.0,
    alternatives: options.AlternativesOption = 3,
    plot: options.PlotOption = None,
    dump: options.DumpOption = None,
    load: options.LoadOption = None,
    solver: options.SolverOption = options.Solver.EXACT,
    time_limit: options.TimeLimitOption = None,
    galvatron: options.GalvatronOption = None,
    galvatron_plan: options.GalvatronPlanOption = None,
    memory_reading: options.MemoryReadingOption = options.MemoryReading.KEPT_BACK,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Find the fastest parallel plan of a model. The plan fits into the memory of the given GPUs."""
    options_given: dict[str, Any] = {
        "model": model,
        "gpus": gpus,
        "gpu": gpu,
        "nodes": nodes,
        "shape": shape,
        "global-batch": global_batch,
    }
    options_given |= {"seq": seq, "frozen-layers": frozen_layers, "memory": memory, "plot": plot, "dump": dump}
    options_given |= {"host-memory": host_memory}
    options_given |= {"only": only, "without": without, "for": framework, "price": price, "simplicity": simplicity}
    time_limit_s, simplicity = inf if time_limit is None else time_limit, 0.02 if simplicity is None else simplicity
    solver_options = options.SolverOptions(solver, tolerance, time_limit_s, alternatives, simplicity)
    if galvatron is not None:
        _reject_conflicting_options("--galvatron", {**options_given, "load": load})
        _print_galvatron(galvatron, galvatron_plan, memory_reading, output)
    elif galvatron_plan is not None:
        raise_input_error(f"--galvatron-plan: {galvatron_plan} needs --galvatron DIR, the profile to evaluate it on")
    elif load is not None:
        _reject_conflicting_options("--load", options_given)
        _print_instances(load, solver_options, output)
    elif price is not None:
        _reject_conflicting_options("--price", {"plot": plot, "dump": dump})
        _print_priced_plan(price, options_given, solver_options, output)
    else:
        _print_request(_build_query(options_given), solver_options, plot=plot, dump=dump, output=output)


def _reject_conflicting_options(option: str, others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise_input_error(f"--{name}: {value} cannot be combined with {option}")


def _build_query(options_given: Mapping[str, Any]) -> PlanQuery:
    from cli.planning.framework_export import parse_framework
    from cli.planning.limits import parse_limits
    from cli.planning.request import GpuSelection, build_query, load_trained_model

    for needed in ("model", "global-batch"):
        if options_given[needed] is None:
            raise_input_error(f"Missing option '--{needed}'")
    where = GpuSelection(**{name: options_given[name] for name in ("gpus", "gpu", "nodes", "shape")})
    model = load_trained_model(
        options_given["model"], seq=options_given["seq"] or 0, frozen_layers=options_given["frozen-layers"] or 0
    )
    framework = parse_framework(options_given["for"])
    query = build_query(
        where,
        model=model,
        global_batch=options_given["global-batch"],
        memory=options_given["memory"],
        host_memory=options_given["host-memory"],
        limits=parse_limits(options_given["only"], options_given["without"]),
    )
    if framework is None:
        return query
    if len(query.hardware) > 1:
        models = " and ".join(profile.gpu for profile in query.hardware)
        raise_input_error(f"--for: {framework.title} has no plans on several GPU models ({models}). Plan one of them.")
    return replace(query, framework=framework.name)


def _print_priced_plan(
    file: str, options_given: Mapping[str, Any], solver_options: options.SolverOptions, output: OutputFormat
) -> None:
    from cli.planning.priced_plan import PlanFile, render_priced_plan, solve_priced_plan

    plan_file = PlanFile.read(file)
    query = _build_query({**options_given, **plan_file.list_missing_options(options_given)})
    if query.is_curve:
        raise_input_error("--gpus: a range cannot be combined with --price. Use one number of GPUs.")
    answer = solve_priced_plan(plan_file, query, tolerance=solver_options.tolerance)
    if answer["runnable"]:
        answer = _add_export(answer, query, solver_options)
    elif query.framework:
        from cli.planning.framework_export import find_nearest_answer

        answer = {**answer, "nearest": find_nearest_answer(answer, query)}
    print_document(answer, output, lambda: _render_with_export(answer, render_priced_plan(answer)))
    if not answer["runnable"]:
        raise CommandError(f"{file}: the plan cannot run: {answer['violation']}{_suggest_plan(answer, query)}")


def _print_request(
    query: PlanQuery, solver_options: options.SolverOptions, *, plot: str | None, dump: str | None, output: OutputFormat
) -> None:
    if not query.is_curve:
        if plot is not None:
            raise_input_error(f"--plot: {plot} needs a scaling curve. Use a range: --gpus A:B.")
        _print_plan(query, solver_options, dump, output)
    elif dump is not None or solver_options.solver is not options.Solver.EXACT:
        raise_input_error("--gpus: a range cannot be combined with --dump or --solver milp. Use one number of GPUs.")
    else:
        _print_curve(query, solver_options, plot, output)


def _print_plan(
    query: PlanQuery, solver_options: options.SolverOptions, dump: str | None, output: OutputFormat
) -> None:
    from cli.planning.plan_tables import render_plan

    request = query.build_request(query.shapes[0])
    if dump is not None:
        from cli.planning.solution import write_instances

        print_message(f"{write_instances(request, dump)} instances written to {dump}")
    used = request.shape
    if solver_options.solver is options.Solver.MILP:
        from cli.planning.solution import solve_with_milp

        answer = solve_with_milp(request, solver_options)
    else:
        from cli.planning.solution import solve_plan

        answer, used = solve_plan(
            request,
            tolerance=solver_options.tolerance,
            alternatives=solver_options.alternatives,
            simplicity=solver_options.simplicity,
        )
    if "infeasible" not in answer:
        answer = _add_export(answer, query, solver_options)
    gpus = f"{used}, out of {request.shape}" if used != request.shape else str(used)
    _print_or_fail(
        answer,
        output,
        f"no plan on {request.shape}",
        lambda: _render_with_export(answer, render_plan(answer, shape=gpus, model=query.model)),
    )


def _add_export(answer: dict[str, Any], query: PlanQuery, solver_options: options.SolverOptions) -> dict[str, Any]:
    """Return the answer with its plan in the words of the query's framework, if there is one."""
    if not query.framework:
        return answer
    from cli.planning.framework_export import export_answer, parse_framework

    framework = parse_framework(query.framework)
    assert framework is not None, "the query names a framework"
    return {**answer, "export": export_answer(answer, framework, query, tolerance=solver_options.tolerance)}


def _render_with_export(answer: Mapping[str, Any], plan: RenderableType) -> RenderableType:
    if "export" not in answer:
        return plan
    from rich.text import Text

    from cli.output import stack
    from cli.planning.framework_export import render_export

    return stack(plan, Text(), render_export(answer["export"]))


def _suggest_plan(answer: Mapping[str, Any], query: PlanQuery) -> str:
    """Return the plans that the query's framework can express instead: the nearest one, and the fastest."""
    from cli.planning.plan_tables import summarize_plan

    named = {"nearest": answer.get("nearest"), "fastest": answer["optimum"]} if query.framework else {}
    found = [f"The {name} plan for {query.framework}: {summarize_plan(plan)}" for name, plan in named.items() if plan]
    return "".join(f"\n  {sentence}" for sentence in found)


def _print_curve(
    query: PlanQuery, solver_options: options.SolverOptions, plot: str | None, output: OutputFormat
) -> None:
    from cli.planning.curve_chart import CurveChart
    from cli.planning.plan_tables import render_curve
    from cli.planning.solution import solve_curve

    title = f"{query.model.name} on {query.hardware[0].gpu}, global batch {query.global_batch}"
    picture = None if plot is None else CurveChart(plot, title)
    points = solve_curve(query, tolerance=solver_options.tolerance)
    print_document(
        {"points": points}, output, lambda: render_curve(points, memory_limit_bytes=query.memory_limit_bytes)
    )
    if all("infeasible" in point for point in points):
        raise CommandError(
            f"no plan is feasible on any of {len(points)} shapes. On the largest: {_format_infeasible(points[-1])}"
        )
    if picture is not None:
        picture.draw(points)
        print_message(f"Scaling curve saved to {plot}.")


def _print_instances(file: str, solver_options: options.SolverOptions, output: OutputFormat) -> None:
    from cli.planning.plan_tables import render_solution
    from cli.planning.solution import solve_instances_file

    answer = solve_instances_file(file, solver_options)
    _print_or_fail(answer, output, f"{file}: no solution", lambda: render_solution(answer))


def _print_galvatron(folder: str, plan_file: str | None, reading: options.MemoryReading, output: OutputFormat) -> None:
    from cli.planning.galvatron import render_galvatron_plans, solve_galvatron

    answer = solve_galvatron(folder, plan_file, reading)
    print_document(answer, output, lambda: render_galvatron_plans(answer))
    if "infeasible" in answer:
        raise CommandError(f"no plan for {folder}: {answer['infeasible']}")


def _print_or_fail(
    answer: Mapping[str, Any], output: OutputFormat, failure: str, render: Callable[[], RenderableType]
) -> None:
    """Print the answer. If it is infeasible, fail with the reason; JSON and YAML output get the document as well."""
    if "infeasible" not in answer:
        print_document(answer, output, render)
        return
    if output is not OutputFormat.TABLE:
        print_document(answer, output, render)
    raise CommandError(f"{failure}: {_format_infeasible(answer)}")


def _format_infeasible(answer: Mapping[str, Any]) -> str:
    """Return the reason, the binding constraint and the smallest change that helps, one per line."""
    needs, _, change = answer["infeasible"].rpartition("; ")
    lines = [needs, f"  change: {change}"] if needs else [change]
    return "\n".join([lines[0], f"  binding: {answer['constraint']}", *lines[1:]])
