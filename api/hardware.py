"""Hardware that plans are computed from: profiles of GPU models, and networks of pools."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from fastapi import Path, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.conditional_requests import IfMatchHeader, repeated_creation, require_match, set_etag
from api.http.dependencies import ContextDep, LimitParameter, PoolNamePath, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict, raise_invalid_field, raise_not_found
from api.http.paging import CursorParameter, PageOf, page_by_name
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, VIEWER, requires
from api.pool_views import PoolView
from api.pools import pool_response
from api.state import RequestContext
from scheduler.documents.document import InvalidField, to_printable
from scheduler.documents.fleet import PoolNetworkDocument, to_pool_network
from scheduler.documents.hardware import PROFILE_BYTES_MAX, GpuName, GpuProfileDocument
from scheduler.domain.commands import CommandBody, DeleteGpuProfile, SetGpuProfile, SetPoolNetwork
from scheduler.domain.gpu_users import describe_gpu_users
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.estimated_gpus import load_estimated_gpus
from scheduler.scheduling.preconditions import gpu_profile_etag, pool_etag
from scheduler.solver.profiles.catalog import (
    GPU_UNITS,
    GpuSource,
    HardwareProfile,
    Precision,
    ProfileError,
    find_gpu_source,
    list_gpu_names,
    load_gpu,
    parse_gpu,
    read_gpu_json,
)
from scheduler.solver.profiles.profile_document import unwrap_value

_REFUSED_FIELD = re.compile(r": (?:field ')?(\w+)'? is ")

GpuNamePath = Annotated[str, Path(description="Profile name of the GPU model, such as `h100-80g`.")]
NewGpuNamePath = Annotated[GpuName, Path(description="Profile name of the GPU model. A new one adds a model.")]

router = create_router("hardware")


class GpuNetworkView(TypedDict):
    """The network between nodes of a GPU model, as plans use it: the slowest of all pools that a job may use."""

    bandwidth_bytes_per_s: Annotated[float, Field(description="Of one network port, in one direction.")]
    latency_s: Annotated[float, Field(description="Start-up time of a collective or message between nodes.")]
    gpus_per_nic: Annotated[float, Field(description="GPUs of a node that share a network port.")]
    of_profile: Annotated[bool, Field(description="Whether these are the profile's own figures, not those of a pool.")]


class GpuProfileView(TypedDict):
    """The profile of a GPU model, in its main figures."""

    name: Annotated[str, Field(description="Name of the GPU model, by which nodes and jobs refer to it.")]
    source: Annotated[
        GpuSource,
        Field(
            description="`set`: by an admin on this service. `file`: in a folder of profiles. `shipped`: with Ebbtide. "
            "`estimated`: from what a machine reported."
        ),
    ]
    version: Annotated[int | None, Field(description="Number of the profile that was set, from 1. Null: none was set.")]
    set_at_s: Annotated[float | None, Field(description="Time at which it was set, in seconds since 1970 (UTC).")]
    set_by: Annotated[str | None, Field(description="Principal that set it. Null: none was set.")]
    nodes: Annotated[int, Field(description="Number of nodes with this GPU model.")]
    precision: Annotated[Precision, Field(description="Number format of training to which the figures apply.")]
    memory_bytes: Annotated[int, Field(description="Capacity of one GPU in bytes, of which plans leave a reserve.")]
    peak_flops_per_s: Annotated[float, Field(description="Peak of matrix products by datasheet, per second.")]
    efficiency: Annotated[float, Field(description="Share of the peak that matrix products achieve.")]
    intra_bandwidth_bytes_per_s: Annotated[
        float, Field(description="What collectives achieve within a node, per GPU and direction, in bytes per second.")
    ]
    network: Annotated[GpuNetworkView, Field(description="Network between nodes, as plans use it now.")]


class GpuProfileDetailsView(GpuProfileView):
    """The profile of a GPU model, as it was written."""

    profile: Annotated[dict[str, Any], Field(description="The whole document. A pool's network does not show in it.")]


@router.get("/hardware/gpus")
@requires(VIEWER)
def list_gpu_profiles(
    context: ContextDep, limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[GpuProfileView]:
    """List the profiles of all known GPU models, by name."""
    names, snapshot = {name: name for name in list_gpu_names()}, context.snapshot
    return page_by_name("gpus", names, lambda name: _gpu_view(name, snapshot), cursor=cursor, limit=limit)


@router.get("/hardware/gpus/{gpu}")
@requires(VIEWER)
def get_gpu_profile(gpu: GpuNamePath, context: ContextDep, response: Response) -> GpuProfileDetailsView:
    """Return the profile of a GPU model: the figures, their sources, and measured collectives."""
    _require_gpu(gpu)
    return _gpu_response(context, gpu, response)


@router.put(
    "/hardware/gpus/{gpu}", status_code=202, responses=repeated_creation(GpuProfileDetailsView) | problem_responses(409)
)
@requires(ADMIN)
def set_gpu_profile(
    gpu: NewGpuNamePath,
    document: GpuProfileDocument,
    context: ContextDep,
    response: Response,
    if_match: IfMatchHeader = "",
) -> GpuProfileDetailsView:
    """Set or replace the profile of a GPU model, as `ebbtide profile` writes it. Plans are solved again.

    Running jobs keep their plans until scheduling gives them other GPUs. An equal profile changes nothing.
    """
    text = _check_profile(gpu, document.root)
    before = context.snapshot.gpu_profiles.get(gpu)
    basis = require_match(if_match, gpu_profile_etag(gpu, before), f"the profile of GPU {gpu}")
    if before is not None and before.profile_json == text:
        declare_audited()
        response.status_code = 200
        return _gpu_response(context, gpu, response)
    return _gpu_response(_send(context, SetGpuProfile(gpu, text), basis), gpu, response)


@router.delete("/hardware/gpus/{gpu}", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def delete_gpu_profile(gpu: GpuNamePath, context: ContextDep, if_match: IfMatchHeader = "") -> GpuProfileView:
    """Delete the profile that was set, and return to the one from before: a file's, the shipped or the estimated one.

    A GPU model without another profile must have no nodes left.
    """
    _require_gpu(gpu)
    profile = context.snapshot.gpu_profiles.get(gpu)
    basis = require_match(if_match, gpu_profile_etag(gpu, profile), f"the profile of GPU {gpu}")
    if profile is None:
        raise_conflict(f"no profile of GPU {gpu} was set. Its {find_gpu_source(gpu)} profile cannot be deleted")
    view = _gpu_view(gpu, context.snapshot)
    load_estimated_gpus(context.store.machines)
    if find_gpu_source(gpu, is_set_ignored=True) is None:
        _refuse_use(gpu, context.snapshot)
    _send(context, DeleteGpuProfile(gpu), basis)
    return view


@router.put("/pools/{name}/network", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def set_pool_network(
    name: PoolNamePath,
    document: PoolNetworkDocument,
    context: ContextDep,
    response: Response,
    if_match: IfMatchHeader = "",
) -> PoolView:
    """Set the network between the nodes of a pool. Plans on these nodes are solved again.

    It replaces the network of the GPU profile. A job that may use several pools gets plans for the slowest network.
    """
    return _change_network(context, SetPoolNetwork(name, to_pool_network(document)), if_match, response)


@router.delete("/pools/{name}/network", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def delete_pool_network(
    name: PoolNamePath, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> PoolView:
    """Return to the network of the GPU profiles for the nodes of a pool."""
    return _change_network(context, SetPoolNetwork(name, None), if_match, response)


def _change_network(context: RequestContext, change: SetPoolNetwork, if_match: str, response: Response) -> PoolView:
    pool = context.pool(change.pool)
    basis = require_match(if_match, pool_etag(pool), f"pool {pool.name}")
    if pool.network == change.network:
        declare_audited()
        return pool_response(context, pool, response)
    after = context.send(change, basis=basis)
    return pool_response(after, after.snapshot.pools[pool.name], response)


def _send(context: RequestContext, change: CommandBody, basis: str) -> RequestContext:
    """Send the change, and plan from the new hardware in this process from now on."""
    after = context.send(change, basis=basis)
    context.state_reader.read(context.now_s)
    return after


def _require_gpu(gpu: str) -> None:
    if gpu not in list_gpu_names():
        raise_not_found("GPU", gpu, list_gpu_names())


def _refuse_use(gpu: str, snapshot: Snapshot) -> None:
    """Raise a 409 if nodes or live jobs need the GPU model."""
    if users := describe_gpu_users(gpu, snapshot):
        raise_conflict(f"GPU {gpu} has no other profile, and {users} need it. Set another one, or remove them first")


def _check_profile(gpu: str, document: dict[str, Any]) -> str:
    """Return the document as JSON text.

    Raises:
        InvalidDocumentError: `gpu` is not the name in the path, or the profile is too large.
        ProblemError: 422 if the profile is invalid. The detail names field, value and what is accepted.
    """
    text = json.dumps(document)
    if len(text) > PROFILE_BYTES_MAX:
        raise_invalid_field("body", f"{len(text)} bytes", f"a profile of at most {PROFILE_BYTES_MAX} bytes")
    try:
        profile = parse_gpu(text)
    except ProfileError as error:
        raise ProblemError(422, "invalid-input", str(error), (_to_invalid_field(error, document),)) from None
    if profile.gpu != gpu:
        raise_invalid_field("gpu", profile.gpu, f"{gpu}, as in the path")
    return text


def _to_invalid_field(error: ProfileError, document: dict[str, Any]) -> InvalidField:
    """Return the field that the message names, and what it accepts."""
    message = str(error)
    found = _REFUSED_FIELD.search(message)
    inner = "collectives" if "collectives" in document else "body"
    name = found[1] if found and found[1] in {*document, *GPU_UNITS, "gpu", "precision", "dimensions"} else inner
    allowed = message.rpartition("; ")[2]
    for opening in ("it must be ", "allowed are "):
        allowed = allowed.removeprefix(opening)
    return InvalidField(name, to_printable(unwrap_value(document.get(name))), allowed)


def _gpu_response(context: RequestContext, gpu: str, response: Response) -> GpuProfileDetailsView:
    set_etag(response, gpu_profile_etag(gpu, context.snapshot.gpu_profiles.get(gpu)))
    return {**_gpu_view(gpu, context.snapshot), "profile": json.loads(read_gpu_json(gpu))}


def _gpu_view(gpu: str, snapshot: Snapshot) -> GpuProfileView:
    used, record = load_gpu(gpu), snapshot.gpu_profiles.get(gpu)
    source = find_gpu_source(gpu)
    assert source is not None, "the caller has found the profile"
    return {
        "name": gpu,
        "source": source,
        "version": None if record is None else record.version,
        "set_at_s": None if record is None else record.set_at_s,
        "set_by": None if record is None else record.set_by,
        "nodes": sum(node.gpu == gpu for node in snapshot.nodes.values()),
        "precision": used.precision,
        "memory_bytes": used.memory_bytes,
        "peak_flops_per_s": used.peak_flops_per_s,
        "efficiency": used.efficiency,
        "intra_bandwidth_bytes_per_s": used.intra_bandwidth_bytes_per_s,
        "network": _network_view(used, parse_gpu(read_gpu_json(gpu))),
    }


def _network_view(used: HardwareProfile, written: HardwareProfile) -> GpuNetworkView:
    return {
        "bandwidth_bytes_per_s": used.inter_bandwidth_bytes_per_s,
        "latency_s": used.inter_latency_s,
        "gpus_per_nic": used.gpus_per_nic,
        "of_profile": used == written,
    }
