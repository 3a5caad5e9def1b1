"""The models that an inference pool serves: read and replace their documents."""

from __future__ import annotations

from typing import Self

from fastapi import Response
from pydantic import Field, model_validator

from api.http.conditional_requests import IfMatchHeader, require_match, set_etag
from api.http.dependencies import ContextDep, PoolNamePath, create_router
from api.http.errors import problem_responses, raise_conflict
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, VIEWER, requires
from api.pool_views import PoolView
from api.pools import pool_response
from api.serving_views import PoolServingView
from api.state import RequestContext
from scheduler.documents.document import Document
from scheduler.documents.serving import PoolModels, check_served_names, to_model_document, to_served_model
from scheduler.domain.commands import SetServedModels
from scheduler.domain.demand_source import describe_source_conflict
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.runtime.served_models import check_served_models
from scheduler.scheduling.preconditions import pool_etag

router = create_router("fleet")


class ServingChange(Document):
    """All models that a pool serves from now on."""

    serving: PoolModels = Field(description="Documents of `ebbtide serving size`, with lengths and sizing.")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_served_names(self.serving)
        return self


@router.get("/pools/{name}/serving", responses=problem_responses(409))
@requires(VIEWER)
def get_served_models(name: PoolNamePath, context: ContextDep, response: Response) -> PoolServingView:
    """Return the documents of the models that a pool serves."""
    pool = _inference_pool(context, name)
    set_etag(response, pool_etag(pool))
    return {"pool": name, "models": [to_model_document(each) for each in pool.serving]}


@router.put("/pools/{name}/serving", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def set_served_models(
    name: PoolNamePath, change: ServingChange, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> PoolView:
    """Replace the models that a pool serves. Their requests can be reported as its demand."""
    pool = _inference_pool(context, name)
    basis = require_match(if_match, pool_etag(pool), f"pool {name}")
    models = tuple(map(to_served_model, change.serving))
    if conflict := describe_source_conflict(pool.demand, (each.model for each in models)):
        raise_conflict(f"pool {name}: {conflict}. Delete the demand source first, and set one for the new models")
    check_served_models(models)
    if models == pool.serving:
        declare_audited()
        return pool_response(context, pool, response)
    after = context.send(SetServedModels(name, models), basis=basis)
    return pool_response(after, after.snapshot.pools[name], response)


def _inference_pool(context: RequestContext, name: str) -> Pool:
    pool = context.pool(name)
    if pool.kind is not PoolKind.INFERENCE:
        raise_conflict(f"pool {name} is a training pool. Only inference pools serve models")
    return pool
