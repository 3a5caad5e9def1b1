"""What may be asked for again: one `Idempotency-Key`, one job, whatever answers were lost on the way.

The key names the command, for each principal its own, and a store takes a command once: whoever asks again finds the
one that was taken first, in the inbox or among those consumed. Two requests at the same time are no special case.
Webhooks and simulations are made without a command: their keys are kept beside them, in the same transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, TypeVar

from fastapi import Header

from api.errors import ProblemError, conflict
from api.identity.principal import Principal
from api.world import World, load_world
from scheduler.documents.document import Document
from scheduler.domain.command import SubmitJob
from scheduler.domain.job import JobSpec
from scheduler.store.sql import SqlStore
from scheduler.store.sql_keys import CreationKey, KeyTakenError

KEY_LENGTH_MAX = 255
_REUSED = "idempotency-key-reused"
T = TypeVar("T")

IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=KEY_LENGTH_MAX,
        pattern=r"^[!-~]+$",
        description="Any text without blanks. Whoever asks again with it gets what it made the first time.",
    ),
]


def submit_once(world: World, spec: JobSpec, key: str, new_id: Callable[[], str]) -> tuple[World, str]:
    """The world with the job of this key in it, and the job's id.

    Raises:
        ProblemError: 422 where the key came with another job before; 409 where the job is, or was, refused.
    """
    command_id = f"api-key-{_digest(f'{world.principal.name} {key}')}"
    refused: ProblemError | None = None
    try:  # most keys are new, so nobody looks first; what stands against a new job is nothing to one that is there
        job_id = new_id()
        if after := world.send_once(SubmitJob(job_id, spec), command_id):
            return after, job_id
    except ProblemError as problem:
        refused = problem
    taken = world.store.command(command_id)
    if taken is None:
        assert refused is not None
        raise refused
    assert isinstance(taken.body, SubmitJob)
    if taken.body.spec != spec:
        detail = f"the key came with another job document before, which became job {taken.body.job_id}: use a new key"
        raise ProblemError(422, _REUSED, detail)
    now = load_world(world.present, world.store, world.now_s, world.principal)
    if taken.body.job_id not in now.snapshot.jobs and world.store.ended_job(taken.body.job_id) is None:
        conflict("the job of this key was refused when its turn came, because somebody was faster: use a new key")
    return now, taken.body.job_id


def creation_key(key: str, principal: Principal, noun: str, document: Document) -> CreationKey | None:
    """Of a webhook or a simulation; None without a key."""
    if not key:
        return None
    asked = json.dumps(document.model_dump(mode="json"), sort_keys=True)
    return CreationKey(_digest(f"{noun} {principal.name} {key}"), _digest(asked))


def make_once(store: SqlStore, key: CreationKey | None, make: Callable[[], T], find: Callable[[str], T | None]) -> T:
    """What `make` makes, which takes the key along; where the key was taken before, what was made then, as `find` finds
    it by its id.

    Raises:
        ProblemError: 422 where the key came with another document before; 409 where what it made is gone.
    """
    taken = None if key is None else store.creation_keys.find(key.id)
    if taken is None:
        try:
            return make()
        except KeyTakenError as faster:
            taken = store.creation_keys.find(str(faster))
            assert taken is not None, "keys are never given back"
    before, made = taken
    if before != key:
        raise ProblemError(
            422, _REUSED, f"the key came with another document before, which became {made}: use a new key"
        )
    return find(made) or conflict(f"{made}, which this key made, was deleted: use a new key")


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
