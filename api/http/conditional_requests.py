"""Headers of conditional and repeatable requests: `ETag`, `If-Match`, `If-None-Match` and `Idempotency-Key`.

If-None-Match: if a tag covers the whole body (a snapshot, an archive), a client that has the body gets 304.

If-Match: scheduler/scheduling defines what an ETag covers. A stale tag is answered with 412 at once. A matching tag
travels with the command as its `basis` and is compared again when the command is applied. Tags are strong, because
If-Match compares strongly (RFC 9110, 13.1.1). Responses that carry a tag forbid storing (`Cache-Control: no-store`),
because other parts of the body change under the same tag.

Idempotency-Key: the key determines the command id, per principal, and the store accepts a command id once. A retry gets
the job of the first request, even if both arrive at once. Webhooks, simulations, tokens and service accounts are
created without a command: the store saves their keys in the same transaction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Any, TypeVar

from fastapi import Header, Response

from api.http.errors import ProblemError, raise_conflict
from api.identity.principals import Principal
from api.state import RequestContext, load_request_context
from scheduler.documents.document import Document
from scheduler.domain.commands import SubmitJob
from scheduler.domain.job_spec import JobSpec
from scheduler.store.api_protocol import ApiStore, IdempotencyKey, IdempotencyKeyUsedError

KEY_LENGTH_MAX = 255
T = TypeVar("T")
_ENTITY_TAGS = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')
_KEY_REUSED = "idempotency-key-reused"

IfMatchHeader = Annotated[
    str,
    Header(
        alias="If-Match",
        max_length=1000,
        description="`ETag` of an earlier response. If the resource has changed since, the request fails with 412.",
    ),
]
IdempotencyKeyHeader = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=KEY_LENGTH_MAX,
        pattern=r"^[!-~]+$",
        description="Any text without blanks. A retry with the same key returns what the first request created.",
    ),
]
IfNoneMatchHeader = Annotated[
    str,
    Header(
        alias="If-None-Match",
        max_length=1000,
        description="`ETag` of the copy that the client has. If it is current, the response is 304 without a body.",
    ),
]
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {
        "description": "The client's copy is current.",
        "headers": {"ETag": {"description": "Tag of the current copy.", "schema": {"type": "string"}}},
    }
}
"""The `responses` of a route that takes `IfNoneMatchHeader`."""


def repeated_creation(view: type) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route whose repetition returns the existing object with status 200."""
    return {200: {"model": view, "description": "It existed before, with the same fields. Nothing has changed."}}


def is_current(if_none_match: str, etag: str) -> bool:
    """Return whether `If-None-Match` lists `etag`. Compares weakly (RFC 9110, 13.1.2)."""
    listed = (tag.removeprefix("W/") for tag in _ENTITY_TAGS.findall(if_none_match))
    return if_none_match.strip() == "*" or etag in listed


def not_modified(etag: str) -> Response:
    return Response(status_code=304, headers={"ETag": etag, "Cache-Control": "private, no-cache"})


def set_etag(response: Response, etag: str) -> None:
    response.headers["ETag"] = etag
    response.headers["Cache-Control"] = "no-store"


def require_match(if_match: str, etag: str, noun: str) -> str:
    """Return the basis of the command to send: `etag`, or an empty string if the request has no condition.

    Raises:
        ProblemError: 412 if `if_match` does not list `etag`. Weak tags never match.
    """
    if not if_match or if_match.strip() == "*":
        return ""
    if etag not in _ENTITY_TAGS.findall(if_match):
        detail = f"If-Match: {noun} has changed since {if_match}; its ETag is now {etag}. Read it again, then retry"
        raise ProblemError(412, "changed", detail)
    return etag


def submit_once(
    context: RequestContext, spec: JobSpec, key: str, new_id: Callable[[], str]
) -> tuple[RequestContext, str]:
    """Submit the job unless this key was used before. Return the state with the key's job in it, and the job's id.

    Raises:
        ProblemError: 422 if the key was used with another job document; 409 if the job is or was refused.
    """
    command_id = f"api-key-{_digest(f'{context.principal.idempotency_scope} {key}')}"
    problem: ProblemError | None = None
    try:  # Most keys are new, so send first. A reason against a new job does not matter if the job exists already.
        job_id = new_id()
        if after := context.send_once(SubmitJob(job_id, spec), command_id):
            return after, job_id
    except ProblemError as refused:
        problem = refused
    first = context.store.get_command(command_id)
    if first is None:
        assert problem is not None
        raise problem
    assert isinstance(first.body, SubmitJob)
    if first.body.spec != spec:
        detail = f"the key was used with another job document, for job {first.body.job_id}. Use a new key"
        raise ProblemError(422, _KEY_REUSED, detail)
    current = load_request_context(context.state_reader, context.store, context.now_s, context.principal)
    if first.body.job_id not in current.snapshot.jobs and context.store.get_ended_job(first.body.job_id) is None:
        raise_conflict(
            "the job of this key was refused because a concurrent request was applied first, or its record was deleted "
            "by retention. Use a new key"
        )
    return current, first.body.job_id


def build_creation_key(key: str, principal: Principal, noun: str, document: Document) -> IdempotencyKey | None:
    """Return the stored form of the key of a `noun` to create, or None if `key` is empty."""
    if not key:
        return None
    request = json.dumps(document.model_dump(mode="json"), sort_keys=True)
    return IdempotencyKey(_digest(f"{noun} {principal.idempotency_scope} {key}"), _digest(request))


def create_once(
    store: ApiStore, key: IdempotencyKey | None, create: Callable[[], T], find: Callable[[str], T | None]
) -> T:
    """Return the result of `create` or, if the key was used before, the object that the first request created.

    `create` stores the key in its transaction. `find` looks the first result up by its id.

    Raises:
        ProblemError: 422 if the key was used with another document; 409 if the created object was deleted.
    """
    used = None if key is None else store.idempotency_keys.find(key.id)
    if used is None:
        try:
            return create()
        except IdempotencyKeyUsedError as error:  # by a concurrent request
            used = store.idempotency_keys.find(str(error))
            assert used is not None, "keys are never deleted"
    first_key, created_id = used
    if first_key != key:
        raise ProblemError(422, _KEY_REUSED, f"the key was used with another document, for {created_id}. Use a new key")
    return find(created_id) or raise_conflict(f"{created_id}, which this key created, was deleted. Use a new key")


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
