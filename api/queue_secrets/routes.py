"""Secrets of queues: set, list, delete. No route for users returns a value."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import Path, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from api.http.dependencies import PrincipalDep, QueueNamePath, Service, ServiceDep, create_router
from api.http.errors import ProblemError, raise_conflict, raise_invalid_field, raise_not_found
from api.http.paging import PageOf
from api.identity.audit import new_audit_entry
from api.identity.authorization import QUEUE_ADMIN, SUBMITTER, requires
from api.identity.principals import Principal, Role
from api.queue_secrets.missing_secrets import is_affected
from api.queue_secrets.vault import SecretKeyError
from api.state import load_request_context
from scheduler.documents.document import Label
from scheduler.domain.commands import DeleteSecret, SetSecret
from scheduler.domain.job_queue import is_existing_queue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.secret_reference import SECRET_BYTES_MAX, SECRET_BYTES_MIN
from scheduler.domain.suggestions import suggest
from scheduler.store.sealed_secrets import SealedSecret

MEDIA_TYPE = "application/octet-stream"
_BODY = {"requestBody": {"required": True, "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}}

router = create_router("secrets")
logger = logging.getLogger(__name__)

SecretNamePath = Annotated[Label, Path(description="Name of the secret, by which jobs of the queue refer to it.")]


class SecretView(TypedDict):
    """A secret of a queue, without its value."""

    queue: Annotated[str, Field(description="Queue whose jobs may use it.")]
    name: Annotated[str, Field(description="Name by which the `secrets` of a job refer to it.")]
    version: Annotated[int, Field(description="Number of the value, from 1. It increases with each change.")]
    created_at_s: Annotated[float, Field(description="Time of creation, in seconds since 1970 (UTC).")]
    changed_at_s: Annotated[float, Field(description="Time of the last change of the value, in seconds since 1970.")]
    changed_by: Annotated[str, Field(description="Principal that set the current value.")]


def secret_view(secret: SealedSecret) -> SecretView:
    return {
        "queue": secret.queue,
        "name": secret.name,
        "version": secret.version,
        "created_at_s": secret.created_at_s,
        "changed_at_s": secret.changed_at_s,
        "changed_by": secret.changed_by,
    }


@router.put("/queues/{name}/secrets/{secret_name}", response_model=SecretView, openapi_extra=_BODY)
@requires(QUEUE_ADMIN)
async def set_secret(
    name: QueueNamePath, secret_name: SecretNamePath, request: Request, service: ServiceDep, principal: PrincipalDep
) -> SecretView:
    """Set the value of a secret: the bytes of the body, 6 to 65536. Needs queue-admin of the queue.

    It is encrypted before it is stored. Runs that start from now on get it; running ones keep the old value.
    """
    # The value is the raw body, so that no validation error can repeat a part of it.
    value = await request.body()
    return await run_in_threadpool(_set_secret, name, secret_name, value, service, principal)


@router.get("/queues/{name}/secrets")
@requires(SUBMITTER)
def list_secrets(name: QueueNamePath, service: ServiceDep, principal: PrincipalDep) -> PageOf[SecretView]:
    """List the secrets of a queue by name, without their values. Needs submitter of the queue."""
    _require_queue(service, principal, name, Role.SUBMITTER)
    return {"items": [secret_view(each) for each in service.store.secrets.list_secrets(name)], "next": None}


@router.delete("/queues/{name}/secrets/{secret_name}")
@requires(QUEUE_ADMIN)
def delete_secret(
    name: QueueNamePath, secret_name: SecretNamePath, service: ServiceDep, principal: PrincipalDep
) -> SecretView:
    """Delete a secret. Needs queue-admin of the queue. Jobs that need it wait from their next start on."""
    _require_queue(service, principal, name, Role.QUEUE_ADMIN)
    store, now_s = service.store.secrets, service.clock.now_s()
    known = [each.name for each in store.list_secrets(name)]
    found = store.find(name, secret_name) or raise_not_found("secret", secret_name, known)
    before = {"queue": name, "version": found.version}
    audit = new_audit_entry(principal, now_s, "DeleteSecret", secret_name, before=before)
    if not store.remove(name, secret_name, audit):
        raise_not_found("secret", secret_name)
    _tell_jobs(service, principal, DeleteSecret(name, secret_name))
    return secret_view(found)


def require_secrets(spec: JobSpec, service: Service, *, queue: str) -> None:
    """Check that the queue has all secrets that the job names, and that they can be decrypted.

    A job without its secrets could never start. So it is refused before it holds GPUs.

    Raises:
        InvalidDocumentError: one is missing.
        ProblemError: 409 if one cannot be decrypted, for example because its master key is lost.
    """
    if not spec.program.secret_names:
        return
    known = {each.name: each for each in service.store.secrets.list_secrets(queue)}
    for number, reference in enumerate(spec.program.secrets):
        if reference.name and reference.name not in known:
            names = ", ".join(known) or "none yet"
            allowed = f"a secret of queue {queue} ({names}){suggest(reference.name, known)}"
            raise_invalid_field(f"secrets.{number}.name", reference.name, allowed)
    for name in spec.program.secret_names:
        try:
            service.vault.open(known[name])
        except SecretKeyError as error:
            logger.error("refused a job: %s", error)  # names the key file, which submitters need not know
            raise_conflict(describe_undecryptable(name, queue))


def describe_undecryptable(name: str, queue: str) -> str:
    """Return what a user reads, who need not know the key file."""
    return (
        f"secret {name} of queue {queue} cannot be decrypted, so no job that needs it can start. Set the secret again, "
        "or ask an admin to restore its master key"
    )


def unusable_key_problem(error: SecretKeyError) -> ProblemError:
    """Return the problem of a service whose master keys are unusable."""
    return ProblemError(503, "store-unavailable", str(error), headers={"Retry-After": "30"})


def _set_secret(queue: str, name: str, value: bytes, service: Service, principal: Principal) -> SecretView:
    _require_queue(service, principal, queue, Role.QUEUE_ADMIN)
    if not SECRET_BYTES_MIN <= len(value) <= SECRET_BYTES_MAX:
        allowed = f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes; shorter values cannot be masked in logs"
        raise_invalid_field("body", len(value), allowed)
    now_s, store = service.clock.now_s(), service.store.secrets
    known = store.find(queue, name)
    version = 1 if known is None else known.version + 1
    new = SealedSecret(queue, name, version, "", "", "", now_s, now_s, principal.name)
    try:
        sealed = service.vault.seal(new, value)
    except SecretKeyError as error:
        raise unusable_key_problem(error) from error
    before = None if known is None else {"queue": queue, "version": known.version}
    audit = new_audit_entry(
        principal, now_s, "SetSecret", name, before=before, after={"queue": queue, "version": version}
    )
    stored = store.put(sealed, audit)
    _tell_jobs(service, principal, SetSecret(queue, name))
    return secret_view(stored)


def _require_queue(service: Service, principal: Principal, queue: str, role: Role) -> None:
    """Check that the caller has the role on the queue, and that the queue exists.

    The role is checked first, so that the answer tells nothing about queues of others.
    """
    context = load_request_context(service.state_reader, service.store, service.clock.now_s(), principal)
    context.require_role(role, queue)
    is_existing = is_existing_queue(queue, context.snapshot.queues)
    if not is_existing and service.settings.undeclared_queues == "refuse":
        raise_not_found("queue", queue, context.snapshot.queues if context.visibility.is_unrestricted else ())


def _tell_jobs(service: Service, principal: Principal, change: SetSecret | DeleteSecret) -> None:
    """Let the scheduler know, if a job depends on it. The entry of the secret is the entry of this command too."""
    context = load_request_context(service.state_reader, service.store, service.clock.now_s(), principal)
    if any(is_affected(job, change) for job in context.snapshot.jobs.values()):
        context.send(change, is_audited=False)
