"""Machines: join tokens, joining and its refusals, credentials, revocation, estimated GPU profiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import Request

from api.http.dependencies import Service, require_machine
from api.http.errors import TYPE_PREFIX, ProblemError
from api.identity.machine_credentials import CREDENTIAL_CACHE_S
from api.identity.principals import token_digest
from api.openapi import load_examples
from scheduler.domain.machine import CLOCK_SKEW_S_MAX, GpuDevice, Machine, MachineInventory
from scheduler.executors.agent_executor import CONTACT_MARGIN_S
from scheduler.package_version import get_package_version
from scheduler.settings import Settings
from scheduler.solver.profiles import catalog
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import NOW_S, Problem

UNKNOWN_GPU = {"name": "NVIDIA RTX A6000", "architecture": "8.6", "cores": 10752, "clock_hz": 1_800_000_000}


@pytest.fixture(autouse=True)
def no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_estimates", {})


@pytest.fixture
def guarded() -> Iterator[AuthenticatedService]:
    made = AuthenticatedService().with_fleet()
    yield made
    made.http.close()


def create_token(guarded: AuthenticatedService, **fields: object) -> str:
    made = guarded.request("POST", "/v1/machines/tokens", guarded.root, {"pool": "training", **fields})
    assert made.status_code == 201, made.text
    return str(made.json()["secret"])


def join_document(name: str = "m0", **fields: object) -> dict[str, Any]:
    example = deepcopy(load_examples()["JoinDocument"])
    return {**example, "name": name, "version": get_package_version(), "clock_s": NOW_S, **fields}


def with_gpus(**facts: Any) -> dict[str, Any]:
    inventory = join_document()["inventory"]
    return {**inventory, "gpus": [{**inventory["gpus"][0], **facts, "index": at} for at in range(2)], "links": []}


def join(guarded: AuthenticatedService, token: str, document: dict[str, Any] | None = None) -> httpx.Response:
    return guarded.request("POST", "/v1/machines:join", token, document or join_document())


def require(guarded: AuthenticatedService, credential: str, name: str = "m0") -> Machine:
    """Call what a route of the machine calls first."""
    request = SimpleNamespace(headers={"Authorization": f"Bearer {credential}"})
    service = guarded.app.state.service
    assert isinstance(service, Service)
    return require_machine(service, cast("Request", request), name)


def test_a_machine_joins_a_pool_with_its_node(guarded: AuthenticatedService) -> None:
    answer = join(guarded, create_token(guarded))
    credential, joined = answer.json()["credential"], answer.json()["machine"]
    assert answer.status_code == 201
    assert answer.headers["Cache-Control"] == "no-store"
    assert re.fullmatch(r"ebm_[A-Za-z0-9_-]{43}", credential)
    assert (joined["gpu"], joined["gpus"], joined["pool"], joined["estimated"]) == ("l4", 2, "training", False)
    machine = guarded.request("GET", "/v1/machines/m0", guarded.root)
    assert machine.json()["inventory"] == join_document()["inventory"]
    node = guarded.request("GET", "/v1/nodes/m0", guarded.root).json()
    assert (node["pool"], node["gpu"], node["gpus"], node["estimated"]) == ("training", "l4", 2, False)
    everything = machine.text + guarded.request("GET", "/v1/audit", guarded.root).text
    assert credential not in everything
    assert require(guarded, credential).name == "m0"


def test_token_and_join_are_audited(guarded: AuthenticatedService) -> None:
    join(guarded, create_token(guarded, uses=2))
    [token] = guarded.request("GET", "/v1/machines/tokens", guarded.root).json()["items"]
    guarded.request("DELETE", "/v1/machines/m0", guarded.root)
    guarded.request("DELETE", f"/v1/machines/tokens/{token['id']}", guarded.root)
    entries = guarded.request("GET", "/v1/audit", guarded.root).json()["items"][-4:]
    assert [(entry["action"], entry["subject"], entry["actor"]) for entry in entries] == [
        ("CreateJoinToken", token["id"], "root"),
        ("JoinMachine", "m0", f"join token {token['id']}"),
        ("RevokeMachine", "m0", "root"),
        ("DeleteJoinToken", token["id"], "root"),
    ]
    assert (token["uses_left"], "secret" in token, "digest" in token) == (1, False, False)


def test_a_secret_of_a_token_is_shown_once(guarded: AuthenticatedService) -> None:
    secret = create_token(guarded)
    assert re.fullmatch(r"ebj_[A-Za-z0-9_-]{43}", secret)
    assert secret not in guarded.request("GET", "/v1/machines/tokens", guarded.root).text


def test_a_node_of_the_same_shape_is_used(guarded: AuthenticatedService, problem: Problem) -> None:
    for name, gpus in (("m0", 2), ("m1", 4)):
        node = {"name": name, "pool": "training", "gpu": "l4", "gpus": gpus}
        assert guarded.request("POST", "/v1/nodes", guarded.root, node).status_code == 201
    token = create_token(guarded, uses=2)
    assert join(guarded, token).status_code == 201
    refused = problem(join(guarded, token, join_document("m1")), 409)
    assert [error["field"] for error in refused["errors"]] == ["gpus"]
    assert [token["uses_left"] for token in items(guarded, "/v1/machines/tokens")] == [1]


def items(guarded: AuthenticatedService, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = guarded.request("GET", path, guarded.root).json()["items"]
    return found


def refusal(answer: httpx.Response, problem: Problem, status: int) -> str:
    return str(problem(answer, status)["type"].removeprefix(TYPE_PREFIX))


def test_unknown_used_and_expired_tokens_are_refused(guarded: AuthenticatedService, problem: Problem) -> None:
    used, late = create_token(guarded), create_token(guarded, expires_in_s=30.0)
    assert join(guarded, used).status_code == 201
    assert refusal(join(guarded, "ebj_foreign", join_document("m1")), problem, 401) == "join-token-unknown"
    assert refusal(join(guarded, used, join_document("m1")), problem, 401) == "join-token-used"
    guarded.clock.move_to(NOW_S + 30.0)
    assert refusal(join(guarded, late, join_document("m1")), problem, 401) == "join-token-expired"
    assert refusal(join(guarded, guarded.root, join_document("m1")), problem, 403) == "forbidden"
    assert [machine["name"] for machine in items(guarded, "/v1/machines")] == ["m0"]
    assert [machine["name"] for machine in items(guarded, "/v1/machines?node=m0")] == ["m0"]
    assert items(guarded, "/v1/machines?node=t0") == []
    assert {node["name"] for node in items(guarded, "/v1/nodes")} == {"t0", "m0"}


@pytest.mark.parametrize(
    ("changes", "status", "slug", "field"),
    [
        ({"version": "0.9.1"}, 409, "agent-incompatible", "version"),
        ({"clock_s": NOW_S - 3600.0}, 409, "clock-skew", "clock_s"),
        ({"clock_s": NOW_S + CLOCK_SKEW_S_MAX + 0.1}, 409, "clock-skew", "clock_s"),
        ({"name": "tokens"}, 422, "invalid-input", "name"),
        ({"name": "No Host"}, 422, "invalid-input", "name"),
        ({"address": ""}, 422, "invalid-input", "address"),
        ({"inventory": {}}, 422, "invalid-input", "inventory.gpus"),
        ({"inventory": {"gpus": [{"index": 1, "name": "l4", "memory_bytes": 1}]}}, 422, "invalid-input",
         "inventory.gpus.index"),
        ({"inventory": {"gpus": [{"index": at, "name": f"gpu {at}", "memory_bytes": 1} for at in range(2)]}}, 422,
         "invalid-input", "inventory.gpus"),
        ({"inventory": {"gpus": [{"index": 0, "name": "x9", "memory_bytes": 0}]}}, 422, "invalid-input",
         "inventory.gpus.0.memory_bytes"),
    ],
)  # fmt: skip
def test_a_refused_join_leaves_the_token_unused(
    guarded: AuthenticatedService, problem: Problem, changes: dict[str, Any], status: int, slug: str, field: str
) -> None:
    token = create_token(guarded)
    answer = join(guarded, token, {**join_document(), **changes})
    assert refusal(answer, problem, status) == slug
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert join(guarded, token).status_code == 201


def test_a_patch_release_and_a_small_clock_difference_are_accepted(guarded: AuthenticatedService) -> None:
    version = ".".join([*get_package_version().split(".")[:2], "99"])
    document = join_document(version=version, clock_s=NOW_S - CLOCK_SKEW_S_MAX)
    assert join(guarded, create_token(guarded), document).status_code == 201


def test_a_name_is_taken_until_its_machine_is_revoked(guarded: AuthenticatedService, problem: Problem) -> None:
    token = create_token(guarded, uses=2)
    first = join(guarded, token).json()["credential"]
    assert refusal(join(guarded, token), problem, 409) == "machine-name-taken"
    revoked = guarded.request("DELETE", "/v1/machines/m0", guarded.root).json()["revoked_at_s"]
    assert revoked == NOW_S
    assert guarded.request("DELETE", "/v1/machines/m0", guarded.root).json()["revoked_at_s"] == revoked
    second = join(guarded, token).json()["credential"]
    guarded.clock.move_to(NOW_S + CREDENTIAL_CACHE_S)
    assert require(guarded, second).revoked_at_s is None
    with pytest.raises(ProblemError) as refused:
        require(guarded, first)
    assert (refused.value.status, refused.value.slug) == (401, "unauthenticated")


def test_a_name_is_free_once_the_ranks_of_its_machine_have_ended(
    guarded: AuthenticatedService, problem: Problem
) -> None:
    token = create_token(guarded, uses=2)
    join(guarded, token)
    guarded.store.machines.record_seen({"m0": NOW_S})
    guarded.request("DELETE", "/v1/machines/m0", guarded.root)
    assert refusal(join(guarded, token), problem, 409) == "machine-name-taken"
    guarded.clock.move_to(NOW_S + Settings().disconnect_s + CONTACT_MARGIN_S)
    document = {**join_document("m0"), "clock_s": guarded.clock.now_s()}
    assert join(guarded, token, document).status_code == 201


def test_a_revoked_credential_is_refused_within_seconds_everywhere(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    stores = SqlStore(url), SqlStore(url)
    first, second = AuthenticatedService(stores[0]).with_fleet(), AuthenticatedService(stores[1])
    credential = join(first, create_token(first)).json()["credential"]
    assert require(second, credential).name == "m0"
    first.request("DELETE", "/v1/machines/m0", first.root)
    second.clock.move_to(NOW_S + CREDENTIAL_CACHE_S)
    for service in (first, second):
        with pytest.raises(ProblemError) as refused:
            require(service, credential)
        assert (refused.value.status, refused.value.slug) == (401, "machine-revoked")
    for store in stores:
        store.close()


def test_a_credential_is_good_for_its_machine_only(guarded: AuthenticatedService, problem: Problem) -> None:
    token = create_token(guarded, uses=2)
    credential = join(guarded, token).json()["credential"]
    join(guarded, token, join_document("m1"))
    for given, name, status in ((credential, "m1", 403), ("ebm_foreign", "m0", 401), ("", "m0", 401)):
        with pytest.raises(ProblemError) as refused:
            require(guarded, given, name)
        assert refused.value.status == status
    for secret in (credential, token):
        problem(guarded.request("GET", "/v1/nodes", secret), 403)


def test_a_join_that_loses_the_last_use_to_another_leaves_no_node(
    guarded: AuthenticatedService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, machines = create_token(guarded), guarded.store.machines
    used = replace(machines.list_tokens(after="", limit=1)[0], uses_left=1)
    monkeypatch.setattr(machines, "find_token", lambda digest: used)
    assert join(guarded, token).status_code == 201
    assert refusal(join(guarded, token, join_document("m1")), problem, 401) == "join-token-used"
    assert {node["name"] for node in items(guarded, "/v1/nodes")} == {"t0", "m0"}


def test_a_deleted_token_cannot_be_used(guarded: AuthenticatedService, problem: Problem) -> None:
    token = create_token(guarded)
    [listed] = items(guarded, "/v1/machines/tokens")
    path = f"/v1/machines/tokens/{listed['id']}"
    assert guarded.request("DELETE", path, guarded.root).json() == listed
    problem(guarded.request("DELETE", path, guarded.root), 404)
    assert refusal(join(guarded, token), problem, 401) == "join-token-unknown"


def test_a_token_needs_an_existing_pool(guarded: AuthenticatedService, problem: Problem) -> None:
    answer = guarded.request("POST", "/v1/machines/tokens", guarded.root, {"pool": "trainin"})
    assert [error["field"] for error in problem(answer, 422)["errors"]] == ["pool"]
    guarded.request("POST", "/v1/pools", guarded.root, {"name": "short", "kind": "training"})
    token = create_token(guarded, pool="short")
    guarded.request("DELETE", "/v1/pools/short", guarded.root)
    assert refusal(join(guarded, token), problem, 409) == "pool-missing"


def test_an_unknown_gpu_model_gets_an_estimated_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    first = AuthenticatedService(store).with_fleet()
    inventory = with_gpus(memory_bytes=48 * 2**30, power_watts=300.0, **UNKNOWN_GPU)
    joined = join(first, create_token(first), join_document(inventory=inventory)).json()["machine"]
    assert (joined["gpu"], joined["estimated"]) == ("rtx-a6000-48g", True)
    store.close()
    monkeypatch.setattr(catalog, "_estimates", {})  # as after a restart
    again = AuthenticatedService(SqlStore(url))
    node = again.request("GET", "/v1/nodes/m0", again.root).json()
    assert (node["gpu"], node["estimated"], node["gpu_memory_bytes"]) == ("rtx-a6000-48g", True, 48 * 2**30)
    assert again.request("GET", "/v1/machines/m0", again.root).json()["estimated"]
    request = {"model": "gpt2", "gpu": "rtx-a6000-48g", "gpus": 2, "globalBatch": 8}
    assert again.request("POST", "/v1/plans", again.root, request).json()["estimated"]
    assert not again.request("POST", "/v1/plans", again.root, {**request, "gpu": "l4"}).json()["estimated"]
    again.store.close()


def test_a_stated_model_replaces_the_reported_one(guarded: AuthenticatedService) -> None:
    document = join_document(gpu="l40s", inventory=with_gpus(memory_bytes=46 * 2**30))
    assert join(guarded, create_token(guarded), document).json()["machine"]["gpu"] == "l40s"


def test_stated_cpu_slots_need_no_memory(guarded: AuthenticatedService) -> None:
    gpus = [{"index": at, "name": "cpu", "memory_bytes": 0} for at in range(2)]
    assert join(guarded, create_token(guarded), join_document(inventory={"gpus": gpus})).status_code == 201
    node = guarded.request("GET", "/v1/nodes/m0", guarded.root).json()
    assert (node["gpu"], node["gpus"], node["gpu_memory_bytes"]) == ("cpu", 2, 2 * 10**9)


def state_facts(guarded: AuthenticatedService, credential: str, **changes: Any) -> httpx.Response:
    document = {**join_document(), "clock_s": guarded.clock.now_s(), **changes}
    del document["name"]
    return guarded.request("PUT", "/v1/machines/m0/facts", credential, document)


def test_an_upgraded_agent_states_its_facts_again(guarded: AuthenticatedService) -> None:
    credential = join(guarded, create_token(guarded)).json()["credential"]
    version = ".".join([*get_package_version().split(".")[:2], "99"])
    inventory = {**join_document()["inventory"], "cpus": 7}
    changes = {"version": version, "containment": "partial", "address": "10.9.9.9", "inventory": inventory}
    answer = state_facts(guarded, credential, **changes)
    assert (answer.status_code, answer.json()["problem"]) == (200, "")
    machine = guarded.request("GET", "/v1/machines/m0", guarded.root).json()
    assert (machine["agent_version"], machine["containment"], machine["address"]) == (version, "partial", "10.9.9.9")
    assert (machine["inventory"]["cpus"], machine["joined_at_s"]) == (7, NOW_S)
    assert require(guarded, credential).address == "10.9.9.9"
    assert not guarded.request("GET", "/v1/nodes/m0", guarded.root).json()["cordoned"]


@pytest.mark.parametrize(
    ("facts", "gpu", "gpus", "is_drained"),
    [
        ([{"name": "NVIDIA L4", "memory_bytes": 24 * 10**9}], "l4", 1, True),
        ([{"name": "NVIDIA L40S", "memory_bytes": 48 * 10**9}] * 2, "l40s", 2, True),
        ([{"name": "NVIDIA L4", "memory_bytes": 12 * 10**9}] * 2, "l4", 2, True),
        ([{"name": "NVIDIA L4", "memory_bytes": 24 * 10**9}] * 4, "l4", 4, False),
    ],
)
def test_a_node_whose_gpus_are_gone_is_drained(
    guarded: AuthenticatedService, facts: list[dict[str, Any]], gpu: str, gpus: int, *, is_drained: bool
) -> None:
    credential = join(guarded, create_token(guarded)).json()["credential"]
    inventory = {"gpus": [{**gpu_facts, "index": at} for at, gpu_facts in enumerate(facts)]}
    for _ in range(2):  # as two starts
        stated = state_facts(guarded, credential, inventory=inventory).json()
        assert (stated["gpu"], stated["gpus"], bool(stated["problem"])) == (gpu, gpus, True)
    node = guarded.request("GET", "/v1/nodes/m0", guarded.root).json()
    assert (node["gpu"], node["gpus"], node["draining"]) == ("l4", 2, is_drained)
    assert [bool(machine["problem"]) for machine in items(guarded, "/v1/machines")] == [True]
    actions = [(entry["action"], entry["actor"]) for entry in items(guarded, "/v1/audit")]
    assert actions.count(("CordonNode", "machine m0")) == is_drained


def test_refused_facts_change_nothing(guarded: AuthenticatedService, problem: Problem) -> None:
    token = create_token(guarded, uses=2)
    credential = join(guarded, token).json()["credential"]
    other = join(guarded, token, join_document("m1")).json()["credential"]
    before = guarded.request("GET", "/v1/machines/m0", guarded.root).json()
    assert refusal(state_facts(guarded, credential, version="0.9.1"), problem, 409) == "agent-incompatible"
    assert refusal(state_facts(guarded, credential, clock_s=NOW_S + 3600.0), problem, 409) == "clock-skew"
    assert refusal(state_facts(guarded, credential, inventory={}), problem, 422) == "invalid-input"
    assert refusal(state_facts(guarded, other), problem, 403) == "forbidden"
    assert guarded.request("GET", "/v1/machines/m0", guarded.root).json() == before
    guarded.request("DELETE", "/v1/machines/m0", guarded.root)
    assert refusal(state_facts(guarded, credential), problem, 401) == "machine-revoked"


def test_machines_are_listed_without_their_inventories(guarded: AuthenticatedService) -> None:
    token = create_token(guarded, uses=3)
    for name in ("m2", "m0", "m1"):
        join(guarded, token, join_document(name))
    guarded.store.machines.record_seen({"m1": NOW_S + 2.0})
    found = items(guarded, "/v1/machines")
    assert [(each["name"], each["seen_at_s"]) for each in found] == [("m0", None), ("m1", NOW_S + 2.0), ("m2", None)]
    assert not any("inventory" in each for each in found)
    page = guarded.request("GET", "/v1/machines?limit=2", guarded.root).json()
    assert page["next"]


def register_service(guarded: AuthenticatedService, **facts: Any) -> None:
    inventory = MachineInventory(gpus=tuple(GpuDevice(at, "NVIDIA L4", f"GPU-{at}", 24 * 10**9) for at in range(2)))
    facts = {"inventory": inventory, "digest": token_digest("ebm_own"), **facts}
    guarded.store.machines.register_service(
        Machine("vm", (), "", "", "127.0.0.1", "0.1.0", NOW_S, is_service=True, **facts)
    )


def test_machine_of_the_service_hosts_declared_nodes(guarded: AuthenticatedService) -> None:
    register_service(guarded)
    listed = guarded.request("GET", "/v1/machines", guarded.root).json()["items"]
    assert [(each["name"], each["pool"], each["nodes"], each["problem"]) for each in listed] == [("vm", "", ["t0"], "")]
    assert guarded.request("GET", "/v1/machines/vm", guarded.root).json()["nodes"] == ["t0"]


def test_machine_of_the_service_may_have_no_gpu(guarded: AuthenticatedService) -> None:
    register_service(guarded)
    facts = join_document(inventory=join_document()["inventory"] | {"gpus": [], "links": []})
    del facts["name"]
    answer = guarded.request("PUT", "/v1/machines/vm/facts", "ebm_own", facts)
    assert (answer.status_code, answer.json()["gpus"], answer.json()["gpu"]) == (200, 0, "")


@pytest.mark.parametrize(
    ("gpu", "gpus", "status"), [("l4", 2, 201), ("l4", 3, 422), ("cpu", 8, 201)], ids=["fits", "too many", "slots"]
)
def test_declared_node_has_gpus_of_the_services_machine(
    guarded: AuthenticatedService, gpu: str, gpus: int, status: int
) -> None:
    register_service(guarded)
    node = {"name": "n0", "pool": "training", "gpu": gpu, "gpus": gpus}
    assert guarded.request("POST", "/v1/nodes", guarded.root, node).status_code == status


def test_two_declared_nodes_never_share_gpus(guarded: AuthenticatedService) -> None:
    register_service(guarded)
    node = {"name": "n0", "pool": "training", "gpu": "l4", "gpus": 1}
    assert guarded.request("POST", "/v1/nodes", guarded.root, node).status_code == 201
    assert guarded.request("POST", "/v1/nodes", guarded.root, node | {"name": "n1"}).status_code == 409


def test_only_slots_are_declared_where_the_machine_has_no_gpu(guarded: AuthenticatedService) -> None:
    register_service(guarded, inventory=MachineInventory())
    node = {"name": "n0", "pool": "training", "gpu": "cpu", "gpus": 8}
    refused = guarded.request("POST", "/v1/nodes", guarded.root, node | {"gpu": "l4"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "gpu")
    assert guarded.request("POST", "/v1/nodes", guarded.root, node).status_code == 201
