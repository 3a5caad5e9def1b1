"""Archives of working directories: uploads by users, downloads by the agents of the jobs that name them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Path, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from api.http.conditional_requests import NOT_MODIFIED, IfNoneMatchHeader, is_current, not_modified
from api.http.dependencies import (
    PrincipalDep,
    Service,
    ServiceDep,
    create_router,
    identify_machine,
    require_agent,
    with_hosted_nodes,
)
from api.http.errors import ProblemError, raise_invalid_field, raise_not_found
from api.identity.audit import new_audit_entry
from api.identity.authorization import SUBMITTER, Caller, RouteRule, requires
from api.identity.principals import Principal, Role
from scheduler.documents.job import ArchiveDigest
from scheduler.domain.program import DIGEST_FORM
from scheduler.store.archives import ArchiveUpload, DigestMismatchError

MEDIA_TYPE = "application/gzip"
WRITE_BYTES = 2**20
"""Bytes that one call in a worker thread writes; the server delivers bodies in much smaller pieces."""
_UPLOADER = RouteRule(role=Role.SUBMITTER, body_setting="archive_bytes_max")
_READER = RouteRule(role=Role.ADMIN, on_all_queues=True, or_callers=(Caller.AGENTS, Caller.MACHINES))
_PLAIN_MEDIA_TYPE = "application/octet-stream"
"""Content type of generated clients, which do not know gzip."""
_BYTES = {"schema": {"type": "string", "format": "binary"}}

router = create_router("jobs")

DigestPath = Annotated[ArchiveDigest, Path(description=f"Digest of the archive's bytes: {DIGEST_FORM}.")]


class ArchiveView(TypedDict):
    """A stored archive of a working directory."""

    digest: Annotated[str, Field(description="SHA-256 digest of its bytes, which `workdir.archive` of a job names.")]
    bytes: Annotated[int, Field(description="Size of the compressed archive, in bytes.")]


@router.put(
    "/archives/{digest}",
    status_code=201,
    response_model=ArchiveView,
    responses={200: {"model": ArchiveView, "description": "The archive was stored before."}},
    openapi_extra={"requestBody": {"required": True, "content": {_PLAIN_MEDIA_TYPE: _BYTES}}},
)
@requires(_UPLOADER)
async def upload_archive(
    digest: DigestPath, request: Request, service: ServiceDep, principal: PrincipalDep
) -> JSONResponse:
    """Store a gzip-compressed tar archive under the digest of its bytes. The next submission can name it. An
    interrupted upload leaves nothing. Archives that no job uses are deleted after the setting `archives_kept_days`."""
    try:
        is_new, size = await _store_body(service, principal, digest, request.stream())
    except DigestMismatchError as error:
        raise_invalid_field("digest", digest, f"the digest of the body, which is {error.actual}")
    except ClientDisconnect:
        raise ProblemError(400, "malformed", "the upload was interrupted; nothing was stored. Send it again") from None
    except OSError as error:
        detail = f"the archive cannot be stored: {error.strerror}. Free space in EBBTIDE_ARCHIVE_DIR, then retry"
        raise ProblemError(503, "store-unavailable", detail, headers={"Retry-After": "30"}) from error
    view: ArchiveView = {"digest": digest, "bytes": size}
    return JSONResponse(view, 201 if is_new else 200, headers={"Location": f"/v1/archives/{digest}"})


@router.head("/archives/{digest}", response_class=Response)
@requires(SUBMITTER)
def check_archive(digest: DigestPath, service: ServiceDep, _: PrincipalDep) -> Response:
    """Say whether an archive is stored: 200 or 404. A stored one is kept for another retention period."""
    if not service.archives.mark_used(digest, service.clock.now_s()):
        raise_not_found("archive", digest)
    return Response(status_code=200)


@router.get(
    "/archives/{digest}",
    response_class=FileResponse,
    responses={
        200: {"content": {MEDIA_TYPE: _BYTES, _PLAIN_MEDIA_TYPE: _BYTES}, "description": "The archive."},
        **NOT_MODIFIED,
    },
)
@requires(_READER)
def download_archive(
    digest: DigestPath,
    request: Request,
    service: ServiceDep,
    principal: PrincipalDep,
    *,
    job: Annotated[str, Query(max_length=200, description="Job whose agent downloads. Empty for others.")] = "",
    if_none_match: IfNoneMatchHeader = "",
) -> Response:
    """Download an archive. Needs an admin, a machine that runs a job with the archive, or the agent of such a job."""
    authorize_download(service, request, principal, digest=digest, job_id=job)
    file = service.archives.find(digest)
    if file is None:
        raise_not_found("archive", digest)
    etag = f'"{digest}"'
    if is_current(if_none_match, etag):
        return not_modified(etag)
    accepts_plain = request.headers.get("Accept", "").startswith(_PLAIN_MEDIA_TYPE)
    media_type = _PLAIN_MEDIA_TYPE if accepts_plain else MEDIA_TYPE
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", "Vary": "Accept"}
    return FileResponse(file, media_type=media_type, headers=headers)


def authorize_download(service: Service, request: Request, principal: Principal, *, digest: str, job_id: str) -> None:
    """Check that the caller may read the archive. This is the only place that decides it.

    Raises:
        ProblemError: 403 if no job of the machine or agent names the archive; 401 for an unknown machine.
    """
    now_s = service.clock.now_s()
    if principal.has_role(Role.ADMIN):
        return
    if job_id:
        require_agent(service, request, job_id=job_id)
        jobs = [service.agent_state.job(job_id, now_s)]
    else:
        snapshot = service.agent_state.snapshot(now_s)
        machine = with_hosted_nodes(service, identify_machine(service, request), snapshot)
        holders = [snapshot.index.holders.get(node, {}) for node in machine.nodes]
        jobs = [snapshot.jobs.get(held_by) for gpus in holders for held_by in gpus.values()]
    if not any(job is not None and job.spec.program.archive == digest for job in jobs):
        raise ProblemError(403, "forbidden", f"no job of this machine or agent uses archive {digest}")


def require_archive(service: Service, digest: str) -> None:
    """Check that a submitted job's archive is stored, and keep it. An empty digest names none.

    Raises:
        InvalidDocumentError: it is not stored.
    """
    if digest and not service.archives.mark_used(digest, service.clock.now_s()):
        allowed = f"the digest of a stored archive; upload this one with PUT /v1/archives/{digest} first"
        raise_invalid_field("workdir.archive", digest, allowed)


async def _store_body(
    service: Service, principal: Principal, digest: str, chunks: AsyncIterator[bytes]
) -> tuple[bool, int]:
    """Store the body. Return whether it is new, and its size."""
    size, waiting = 0, bytearray()
    with service.archives.upload(digest) as upload:
        async for chunk in chunks:
            size += len(chunk)
            waiting += chunk
            if len(waiting) >= WRITE_BYTES:
                await run_in_threadpool(upload.write, bytes(waiting))
                waiting.clear()
        is_new = await run_in_threadpool(_finish, upload, bytes(waiting))
    audit = new_audit_entry(principal, service.clock.now_s(), "UploadArchive", digest, after={"bytes": size})
    if is_new:
        await run_in_threadpool(service.store.audit_log.append, audit)
    return is_new, size


def _finish(upload: ArchiveUpload, data: bytes) -> bool:
    upload.write(data)
    return upload.complete()
