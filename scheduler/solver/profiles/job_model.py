"""The model profile that a job's plans are computed from."""

from __future__ import annotations

from scheduler.domain.job_spec import JobSpec
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.profiles.catalog import ProfileError, load_model, parse_model
from scheduler.solver.profiles.model_profile import ModelProfile


def load_job_model(request: CurveRequest, tokens: int = 0) -> ModelProfile:
    """Return the model of a request, at `tokens` tokens if that is not 0.

    Raises:
        ProfileError: the model is unknown, its profile is invalid, or it is not available at this length.
    """
    length = tokens or request.sequence_length
    model = parse_model(request.profile_json, length) if request.profile_json else load_model(request.model, length)
    return model.with_frozen_layers(request.frozen_layers)


def find_lengths_problem(spec: JobSpec) -> str:
    """Return what is allowed instead of the job's longest length, or an empty string if that is valid.

    Raises:
        ProfileError: as `load_job_model`.
    """
    request = spec.curve_request
    if request is None or not spec.lengths:
        return ""
    longest, context = spec.lengths[-1][0], load_job_model(request).sequence_length
    if longest > context:
        return f"at most {context} tokens, which is sequenceLength or the model's own"
    try:
        load_job_model(request, longest)
    except ProfileError as error:
        return f"a length that the model supports: {error}"
    return ""
