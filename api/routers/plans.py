"""Plans: ask the solver about any model on any GPUs. Nothing is kept."""

from __future__ import annotations

from api.answers.plan import SolvedPlanView, solved_plan_view
from api.checks import check_gpu, check_model
from api.dependencies import Service, ServiceDep
from api.errors import ProblemError, refuse
from api.routing import noun_router
from scheduler.documents.plan_request import PlanRequestDocument, shape_of
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.profiles.shipped import ProfileError, load_gpu, load_model, parse_model
from scheduler.solver.request import Infeasible, RequestError, SolveRequest
from scheduler.solver.search.outcome import SearchOutcome
from scheduler.solver.search.search import search

router = noun_router("plans")


@router.post("/plans")
def solve_plan(document: PlanRequestDocument, service: ServiceDep) -> SolvedPlanView:
    """The fastest plan (Plan JSON), with `search_time_s` and how many `candidates` were looked at.

    Beside it: `inspection` (how each device spends the step, its memory and what bounds it), `runners_up` (as many as
    `alternatives` asks for), and for two GPU models a `remark` where mixing them does not pay, with the best plan that
    uses the `whole` shape. Where no plan fits, the problem names the constraint that binds.
    """
    request = _request(document)
    outcome, search_time_s = _search(request, document, service)
    if isinstance(outcome.result, Infeasible):
        raise ProblemError(422, "infeasible", f"{outcome.result.constraint}: {outcome.result.reason}")
    return solved_plan_view(outcome, outcome.result, request, search_time_s)


def _search(request: SolveRequest, document: PlanRequestDocument, service: Service) -> tuple[SearchOutcome, float]:
    """The outcome and the seconds it took, or a 429 problem while too many searches run."""
    with service.search("other plans are being solved"):
        started_s = service.clock.elapsed_s()
        outcome = search(request, tolerance=document.tolerance, runners_up=document.alternatives)
        return outcome, service.clock.elapsed_s() - started_s


def _request(document: PlanRequestDocument) -> SolveRequest:
    shape = shape_of(document)
    for group in shape.groups:
        check_gpu(group.gpu, field="gpu" if document.shape is None else "shape.gpu")
    hardware = tuple(load_gpu(gpu) for gpu in dict.fromkeys(group.gpu for group in shape.groups))
    largest, memory_bytes = max(hardware, key=lambda profile: profile.memory_bytes), document.memory or 0
    if memory_bytes > largest.memory_bytes:
        refuse("memory", memory_bytes, f"at most what a {largest.gpu} has, {largest.memory_bytes} bytes")
    try:
        return SolveRequest(_model(document), hardware, shape, document.global_batch, memory_bytes)
    except RequestError as wrong:
        return refuse("document", None, str(wrong))


def _model(document: PlanRequestDocument) -> ModelProfile:
    model, frozen = _whole_model(document), document.frozen_layers
    if frozen > model.layer_count:
        refuse("frozenLayers", frozen, f"at most {model.layer_count}, the layers of {model.name}")
    return model.with_frozen(frozen)


def _whole_model(document: PlanRequestDocument) -> ModelProfile:
    sequence_length = document.sequence_length or 0
    try:
        if document.profile_json:
            return parse_model(document.profile_json, sequence_length)
        check_model(document.model)
        return load_model(document.model, sequence_length)
    except ProfileError as wrong:
        return refuse("profile" if document.profile_json else "sequenceLength", sequence_length or None, str(wrong))
