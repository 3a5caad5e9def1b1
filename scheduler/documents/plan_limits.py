"""The limits of parallel plans: `plan` of a job document and `limits` of a plan request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import CAMEL_CASE, Document, Text, invalid_field
from scheduler.domain.plan_limits import (
    DEGREES,
    PlanDimension,
    PlanLimits,
    list_dimension_names,
    parse_dimension_name,
)

DIMENSIONS_MAX = 50
DEGREE_MAX = 100_000


def _check_name(name: str) -> str:
    try:
        parse_dimension_name(name)
    except ValueError as error:
        raise PydanticCustomError("dimension", "Input should be {form}", {"form": str(error)}) from None
    return name


def _check_degree_name(name: str) -> str:
    found = parse_dimension_name(_check_name(name))
    if len(found) > 1 or found[0] not in DEGREES:
        form = f"one of {', '.join(each.value for each in DEGREES)}"
        raise PydanticCustomError("degree", "Input should be {form}", {"form": form})
    return name


DimensionName = Annotated[Text, AfterValidator(_check_name)]
DegreeName = Annotated[Text, AfterValidator(_check_degree_name)]
DimensionNames = Annotated[list[DimensionName], Field(max_length=DIMENSIONS_MAX)]
Degree = Annotated[int, Field(strict=True, ge=1, le=DEGREE_MAX)]
NAMES = ", ".join(f"`{name}`" for name in list_dimension_names())


class PlanLimitsDocument(Document):
    """What parallel plans may use. Without any field, there are no limits."""

    model_config = CAMEL_CASE
    only: DimensionNames | None = Field(
        default=None,
        description=f"Dimensions that plans may use; no others. Default: all. Dimensions are {NAMES}.",
    )
    without: DimensionNames = Field(default_factory=list, description="Dimensions that plans may not use.")
    max: Annotated[dict[DegreeName, Degree], Field(max_length=len(DEGREES))] = Field(
        default_factory=dict,
        description="Largest degree by dimension, such as `{tensor: 4, pipeline: 2}`.",
    )
    exclusive: Annotated[
        list[Annotated[list[DimensionName], Field(min_length=2, max_length=2)]], Field(max_length=DIMENSIONS_MAX)
    ] = Field(default_factory=list, description="Pairs of dimensions that a plan may not use together.")
    micro_batches_min: Degree | None = Field(default=None, description="Fewest micro-batches of a step. Default: 1.")
    micro_batches_max: Degree | None = Field(default=None, description="Most micro-batches of a step. Default: any.")
    replica_samples_max: Degree | None = Field(
        default=None, description="Most samples of a micro-batch on one data-parallel replica. Default: any."
    )
    full_pipeline: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Whether a step needs at least as many micro-batches as pipeline stages."
    )
    whole_rounds: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Whether the number of micro-batches must be a multiple of the pipeline stages."
    )
    uniform: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Whether all layers must have the same strategy."
    )
    equal_stages: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Whether all pipeline stages must have the same number of layers."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.only is not None and not self.only:
            raise invalid_field("only", self.only, "at least one dimension; omit it to allow all")
        most, least = self.micro_batches_max, self.micro_batches_min or 1
        if most is not None and most < least:
            raise invalid_field("microBatchesMax", most, f"at least microBatchesMin, which is {least}")
        return self


class JobPlanDocument(PlanLimitsDocument):
    """Limits of a job's parallel plans, and the preference for simple ones."""

    simplicity: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.0,
        description="Prefer the plan with the fewest different strategies among those whose step takes longer than the "
        "fastest by at most this fraction. 0: the fastest plan.",
    )


def to_plan_limits(document: PlanLimitsDocument | None) -> PlanLimits:
    """Return the limits of a document; none without one."""
    if document is None:
        return PlanLimits()
    pairs = [(_parse_names([one]), _parse_names([two])) for one, two in document.exclusive]
    limits = PlanLimits(
        excluded=tuple(_parse_names(document.without)),
        exclusive=tuple((one, two) for ones, twos in pairs for one in ones for two in twos if one is not two),
        degrees_max=tuple((parse_dimension_name(name)[0], degree) for name, degree in document.max.items()),
        micro_batches_min=document.micro_batches_min or 1,
        micro_batches_max=document.micro_batches_max,
        replica_samples_max=document.replica_samples_max,
        fills_pipeline=document.full_pipeline,
        has_whole_rounds=document.whole_rounds,
        is_uniform=document.uniform,
        has_equal_stages=document.equal_stages,
    )
    return limits if document.only is None else limits.combine(PlanLimits.allow_only(_parse_names(document.only)))


def to_plan_document(limits: PlanLimits, simplicity: float) -> dict[str, Any] | None:
    """Return the document of a job's limits, in plain JSON values; None without limits."""
    document = {
        "without": [dimension.value for dimension in limits.excluded] or None,
        "max": {dimension.value: degree for dimension, degree in limits.degrees_max} or None,
        "exclusive": [[one.value, two.value] for one, two in limits.exclusive] or None,
        "microBatchesMin": limits.micro_batches_min if limits.micro_batches_min > 1 else None,
        "microBatchesMax": limits.micro_batches_max,
        "replicaSamplesMax": limits.replica_samples_max,
        "fullPipeline": limits.fills_pipeline or None,
        "wholeRounds": limits.has_whole_rounds or None,
        "uniform": limits.is_uniform or None,
        "equalStages": limits.has_equal_stages or None,
        "simplicity": simplicity or None,
    }
    given = {name: value for name, value in document.items() if value is not None}
    return given or None


def _parse_names(names: Iterable[str]) -> list[PlanDimension]:
    return [dimension for name in names for dimension in parse_dimension_name(name)]
