"""Submissions that may be repeated: one `Idempotency-Key`, one job, whatever answers were lost on the way.

The key names the command, for each principal its own, and a store takes a command once: whoever asks again finds the
one that was taken first, in the inbox or among those consumed. Two requests at the same time are no special case.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Annotated

from fastapi import Header

from api.errors import ProblemError, conflict
from api.world import World, load_world
from scheduler.domain.command import SubmitJob
from scheduler.domain.job import JobSpec

KEY_LENGTH_MAX = 255

IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=KEY_LENGTH_MAX,
        pattern=r"^[!-~]+$",
        description="Any text without blanks. Whoever asks again with it gets the job that it made the first time.",
    ),
]


def submit_once(world: World, spec: JobSpec, key: str, new_id: Callable[[], str]) -> tuple[World, str]:
    """The world with the job of this key in it, and the job's id.

    Raises:
        ProblemError: 422 where the key came with another job before; 409 where the job is, or was, refused.
    """
    command_id = f"api-key-{sha256(f'{world.principal.name} {key}'.encode()).hexdigest()}"
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
        raise ProblemError(422, "idempotency-key-reused", detail)
    now = load_world(world.present, world.store, world.now_s, world.principal)
    if taken.body.job_id not in now.snapshot.jobs and world.store.ended_job(taken.body.job_id) is None:
        conflict("the job of this key was refused when its turn came, because somebody was faster: use a new key")
    return now, taken.body.job_id
