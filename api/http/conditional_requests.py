"""ETag and If-Match: a change is made only if what was asked for so far is what its author has read.

What a tag covers stands in scheduler/scheduling/preconditions. A tag that does not fit any more is answered with 412 at once;
one that fits goes along with the command as its basis, and is looked at again when that is obeyed. If-Match compares
strongly (RFC 9110, 13.1.1), so the tag is written as a strong one; as the rest of the body changes under it, answers
that bear it forbid storing (`Cache-Control: no-store`), and no conditional GET is answered by it.

What may be asked for again: one `Idempotency-Key`, one job, whatever answers were lost on the way.

The key names the command, for each principal its own, and a store takes a command once: whoever asks again finds the
one that was taken first, in the inbox or among those consumed. Two requests at the same time are no special case.
Webhooks and simulations are made without a command: their keys are kept beside them, in the same transaction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, TypeVar

from fastapi import Header, Response

from api.http.errors import ProblemError, raise_conflict
from api.identity.principals import Principal
from api.state import RequestContext, load_request_context
from scheduler.documents.document import Document
from scheduler.domain.commands import SubmitJob
from scheduler.domain.job import JobSpec
from scheduler.store.sql_api_tables import IdempotencyKey, IdempotencyKeyUsedError
from scheduler.store.sql_store import SqlStore

_ENTITY_TAGS = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')

IfMatchHeader = Annotated[
    str,
    Header(
        alias="If-Match",
        max_length=1000,
        description="`ETag` of an earlier answer: nothing is changed, and 412 answered, where it is another one now.",
    ),
]


def set_etag(response: Response, etag: str) -> None:
    response.headers["ETag"] = etag
    response.headers["Cache-Control"] = "no-store"


def require_match(if_match: str, etag: str, noun: str) -> str:
    """The basis of the command to send: `tag`, or nothing where `if_match` asks for none.

    Raises:
        ProblemError: 412 where `if_match` names other tags than `tag`. A weak tag matches none.
    """
    if not if_match or if_match.strip() == "*":
        return ""
    if etag not in _ENTITY_TAGS.findall(if_match):
        detail = f"If-Match: {noun} has changed since {if_match}, its ETag is {etag} now: read it again, then change it"
        raise ProblemError(412, "changed", detail)
    return etag


KEY_LENGTH_MAX = 255
_KEY_REUSED = "idempotency-key-reused"
T = TypeVar("T")

IdempotencyKeyHeader = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=KEY_LENGTH_MAX,
        pattern=r"^[!-~]+$",
        description="Any text without blanks. Whoever asks again with it gets what it made the first time.",
    ),
]


def submit_once(
    context: RequestContext, spec: JobSpec, key: str, new_id: Callable[[], str]
) -> tuple[RequestContext, str]:
    """The world with the job of this key in it, and the job's id.

    Raises:
        ProblemError: 422 where the key came with another job before; 409 where the job is, or was, refused.
    """
    command_id = f"api-key-{_digest(f'{context.principal.name} {key}')}"
    refused: ProblemError | None = None
    try:  # most keys are new, so nobody looks first; what stands against a new job is nothing to one that is there
        job_id = new_id()
        if after := context.send_once(SubmitJob(job_id, spec), command_id):
            return after, job_id
    except ProblemError as problem:
        refused = problem
    taken = context.store.get_command(command_id)
    if taken is None:
        assert refused is not None
        raise refused
    assert isinstance(taken.body, SubmitJob)
    if taken.body.spec != spec:
        detail = f"the key came with another job document before, which became job {taken.body.job_id}: use a new key"
        raise ProblemError(422, _KEY_REUSED, detail)
    now = load_request_context(context.state_reader, context.store, context.now_s, context.principal)
    if taken.body.job_id not in now.snapshot.jobs and context.store.get_ended_job(taken.body.job_id) is None:
        raise_conflict("the job of this key was refused when its turn came, because somebody was faster: use a new key")
    return now, taken.body.job_id


def build_creation_key(key: str, principal: Principal, noun: str, document: Document) -> IdempotencyKey | None:
    """Of a webhook or a simulation; None without a key."""
    if not key:
        return None
    asked = json.dumps(document.model_dump(mode="json"), sort_keys=True)
    return IdempotencyKey(_digest(f"{noun} {principal.name} {key}"), _digest(asked))


def create_once(
    store: SqlStore, key: IdempotencyKey | None, create: Callable[[], T], find: Callable[[str], T | None]
) -> T:
    """What `make` makes, which takes the key along; where the key was taken before, what was made then, as `find` finds
    it by its id.

    Raises:
        ProblemError: 422 where the key came with another document before; 409 where what it made is gone.
    """
    taken = None if key is None else store.idempotency_keys.find(key.id)
    if taken is None:
        try:
            return create()
        except IdempotencyKeyUsedError as faster:
            taken = store.idempotency_keys.find(str(faster))
            assert taken is not None, "keys are never given back"
    before, made = taken
    if before != key:
        raise ProblemError(
            422, _KEY_REUSED, f"the key came with another document before, which became {made}: use a new key"
        )
    return find(made) or raise_conflict(f"{made}, which this key made, was deleted: use a new key")


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
