"""Pools, nodes, demand, loans and the lending switches over HTTP, with real ticks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scheduler.domain.commands import PauseLending, RecallAll, ResumeLending

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem

DAY_S = 86_400.0


def test_a_pool_and_its_nodes_can_be_created_without_a_tick_in_between(fleet: ApiService) -> None:
    assert fleet.store.load().snapshot.generation == 0
    assert [pool["name"] for pool in fleet.get("/v1/pools")["items"]] == ["inference", "training"]
    assert fleet.get("/v1/pools/inference")["capacity_gpus"] == 2
    assert [node["name"] for node in fleet.get("/v1/nodes", pool="inference")["items"]] == ["i0", "i1"]
    fleet.tick()
    assert sorted(fleet.store.load().snapshot.nodes) == ["i0", "i1", "t0"]


def test_a_nodes_memory_defaults_to_its_gpu_models(fleet: ApiService) -> None:
    node = {"name": "t1", "pool": "training", "gpu": "a100-80g", "gpus": 8, "memory": "40GiB"}
    assert fleet.made("/v1/nodes", node)["gpu_memory_bytes"] == 40 * 2**30
    usual = fleet.made("/v1/nodes", {"name": "t2", "pool": "training", "gpu": "a100-80g", "gpus": 8})
    assert usual["gpu_memory_bytes"] > 40 * 2**30


def test_creating_a_pool_again_changes_nothing_and_a_different_one_conflicts(
    fleet: ApiService, problem: Problem
) -> None:
    waiting = fleet.store.count_pending_commands()
    assert fleet.post("/v1/pools", {"name": "training", "kind": "training"}).status_code == 200
    body = problem(fleet.post("/v1/pools", {"name": "training", "kind": "inference"}), 409)
    assert [error["field"] for error in body["errors"]] == ["kind"]
    assert fleet.store.count_pending_commands() == waiting


def test_adding_a_node_again_changes_nothing(fleet: ApiService) -> None:
    waiting = fleet.store.count_pending_commands()
    answer = fleet.post("/v1/nodes", {"name": "t0", "pool": "training", "gpu": "cpu", "gpus": 2})
    assert answer.status_code == 200
    assert fleet.store.count_pending_commands() == waiting


def test_adding_a_node_with_another_shape_conflicts_and_names_the_field(fleet: ApiService, problem: Problem) -> None:
    waiting = fleet.store.count_pending_commands()
    body = problem(fleet.post("/v1/nodes", {"name": "t0", "pool": "training", "gpu": "cpu", "gpus": 4}), 409)
    [error] = body["errors"]
    assert (error["field"], error["value"]) == ("gpus", 4)
    assert error["allowed"].startswith("2")
    assert fleet.store.count_pending_commands() == waiting


def test_a_pool_with_nodes_is_not_deleted(fleet: ApiService, problem: Problem) -> None:
    assert "2 nodes: i0, i1" in problem(fleet.http.delete("/v1/pools/inference"), 409)["detail"]
    for node in ("i0", "i1"):
        assert fleet.http.delete(f"/v1/nodes/{node}").status_code == 202
    assert fleet.http.delete("/v1/pools/inference").status_code == 202
    problem(fleet.http.get("/v1/pools/inference"), 404)
    fleet.tick()
    assert list(fleet.store.load().snapshot.pools) == ["training"]


def test_a_pool_with_lent_nodes_is_not_deleted(fleet: ApiService, problem: Problem) -> None:
    fleet.lend_all()
    body = problem(fleet.http.delete("/v1/pools/inference"), 409)
    assert "i0, i1" in body["detail"]
    assert fleet.store.count_pending_commands() == 0


def test_a_held_or_lent_node_is_not_removed(fleet: ApiService, problem: Problem) -> None:
    job_id = fleet.submit()
    fleet.tick()
    assert job_id in problem(fleet.http.delete("/v1/nodes/t0"), 409)["detail"]
    assert fleet.get("/v1/nodes/t0")["jobs"] == {job_id: [0, 1]}


def test_a_lent_node_is_not_removed(fleet: ApiService, problem: Problem) -> None:
    fleet.lend_all()
    assert "lent" in problem(fleet.http.delete("/v1/nodes/i0"), 409)["detail"]


def test_a_node_is_excluded_from_lending(fleet: ApiService, problem: Problem) -> None:
    assert fleet.get("/v1/nodes/i0")["lendable"] is True
    changed = fleet.http.patch("/v1/nodes/i0", json={"lendable": False})
    assert (changed.status_code, changed.json()["lendable"]) == (202, False)
    node = {"name": "i2", "pool": "inference", "gpu": "cpu", "gpus": 2, "lendable": False}
    assert fleet.made("/v1/nodes", node)["lendable"] is False
    fleet.tick()
    assert fleet.store.load().snapshot.index.withheld == {"i0", "i2"}
    [error] = problem(fleet.post("/v1/nodes", node | {"lendable": True}), 409)["errors"]
    assert (error["field"], error["value"]) == ("lendable", True)
    stale = fleet.http.patch("/v1/nodes/i0", json={"lendable": True}, headers={"If-Match": '"old"'})
    assert stale.status_code == 412


def test_a_part_of_a_node_is_made_lendable(fleet: ApiService, problem: Problem) -> None:
    node = {"name": "i3", "pool": "inference", "gpu": "cpu", "gpus": 4, "lendable_gpus": [2, 3]}
    assert fleet.made("/v1/nodes", node)["lendable_gpus"] == [2, 3]
    [error] = problem(fleet.post("/v1/nodes", node | {"lendable_gpus": [3]}), 409)["errors"]
    assert error["field"] == "lendable_gpus"
    changed = fleet.http.patch("/v1/nodes/i3", json={"lendable_gpus": [0, 1, 2]})
    assert (changed.status_code, changed.json()["lendable_gpus"], changed.json()["lendable"]) == (202, [0, 1, 2], True)
    fleet.tick()
    assert fleet.store.load().snapshot.nodes["i3"].lendable_gpus == (0, 1, 2)
    for wrong in ([0, 1, 2, 3], [4], [1, 1], [2, 1]):
        [error] = problem(fleet.http.patch("/v1/nodes/i3", json={"lendable_gpus": wrong}), 422)["errors"]
        assert error["field"] == "lendable_gpus"
        problem(fleet.post("/v1/nodes", node | {"name": "i4", "lendable_gpus": wrong}), 422)
    problem(fleet.http.patch("/v1/nodes/i3", json={}), 422)
    whole = fleet.http.patch("/v1/nodes/i3", json={"lendable_gpus": []})
    assert whole.json()["lendable_gpus"] == []
    [error] = problem(fleet.post("/v1/nodes", node | {"name": "t9", "pool": "training"}), 422)["errors"]
    assert error["field"] == "lendable_gpus"


def test_a_node_of_a_training_pool_has_no_choice_of_lending(fleet: ApiService, problem: Problem) -> None:
    problem(fleet.http.patch("/v1/nodes/t0", json={"lendable": False}), 409)
    node = {"name": "t9", "pool": "training", "gpu": "cpu", "gpus": 2, "lendable": False}
    [error] = problem(fleet.post("/v1/nodes", node), 422)["errors"]
    assert error["field"] == "lendable"


def test_the_calendar_of_a_pool_is_changed_and_read_back(fleet: ApiService) -> None:
    def change(**lending: Any) -> Any:
        answer = fleet.http.patch("/v1/pools/inference", json={"lending": lending})
        assert answer.status_code == 202, answer.text
        return answer.json()["lending"]

    windows = [{"cron": "0 8 * * 1-5", "duration_s": "10h"}]
    lending = change(time_zone="Europe/Berlin", blackouts=windows, demand_profile=[1.0] * 24)
    assert lending["blackouts"] == [{"start_s": 0.0, "end_s": 36_000.0, "cron": "0 8 * * 1-5", "time_zone": ""}]
    event = {"name": "launch", "start_s": "2026-11-27T08:00", "duration_s": "3h", "factor": 2.0}
    lending = change(known_events=[event])
    assert lending["known_events"][0]["start_s"] == 1_795_762_800.0, "local to the zone that the pool has already"
    writable = {name: value for name, value in lending.items() if name not in ("quantile", "shortage_target")}
    assert change(**writable) == lending


def test_a_node_is_cordoned_drained_and_uncordoned(fleet: ApiService) -> None:
    assert fleet.made("/v1/nodes/t0:cordon")["cordoned"] is True
    assert fleet.made("/v1/nodes/t0:drain")["draining"] is True
    assert fleet.get("/v1/nodes/t0")["serves_training"] is False
    assert fleet.made("/v1/nodes/t0:uncordon")["cordoned"] is False


def test_standby_replicas_are_set_and_removed(fleet: ApiService, problem: Problem) -> None:
    def change(standby: Any) -> Any:
        answer = fleet.http.patch("/v1/pools/inference", json={"lending": {"standby": standby}})
        assert answer.status_code == 202, answer.text
        return answer.json()["lending"]["standby"]

    standby = change({"namespace": "chat", "selector": {"app": "llm"}, "gpu_memory_bytes": "3GiB", "wake_s": "15s"})
    assert (standby["port"], standby["gpu_memory_bytes"], standby["wake_s"]) == (8000, 3 * 2**30, 15.0)
    assert change(standby) == standby
    assert fleet.get("/v1/pools/inference")["way_back"]["start_s"] == 15.0
    body = problem(fleet.http.patch("/v1/pools/inference", json={"lending": {"standby": {**standby, "level": 3}}}), 422)
    assert [error["field"] for error in body["errors"]] == ["lending.standby.level"]
    assert change(None) is None


def test_the_lending_policy_is_changed_field_by_field(fleet: ApiService, problem: Problem) -> None:
    answer = fleet.http.patch("/v1/pools/inference", json={"lending": {"return_deadline_s": "2m", "lent_nodes_max": 1}})
    assert answer.status_code == 202
    lending = fleet.get("/v1/pools/inference")["lending"]
    assert (lending["return_deadline_s"], lending["lent_nodes_max"], lending["headroom"]) == (120.0, 1, 0.0)
    problem(fleet.http.patch("/v1/pools/training", json={"lending": {"enabled": False}}), 409)


def test_demand_is_lost_only_after_it_is_stale(fleet: ApiService) -> None:
    def change(status: int, **lending: object) -> None:
        assert fleet.http.patch("/v1/pools/inference", json={"lending": lending}).status_code == status

    change(202, demand_stale_s="10m", demand_lost_s="1h")
    change(422, demand_stale_s="2h")
    change(422, demand_stale_s="2h", demand_lost_s="1h")
    lending = fleet.get("/v1/pools/inference")["lending"]
    assert (lending["demand_stale_s"], lending["demand_lost_s"]) == (600.0, 3600.0)


def test_one_kind_of_risk_replaces_the_other(fleet: ApiService, problem: Problem) -> None:
    def change(**lending: float) -> tuple[float | None, float]:
        assert fleet.http.patch("/v1/pools/inference", json={"lending": lending}).status_code == 202
        shown = fleet.get("/v1/pools/inference")["lending"]
        return shown["shortage_target"], shown["quantile"]

    assert change(quantile=0.97) == (None, 0.97)
    assert change(shortage_target=0.01) == (0.01, 0.999)
    assert change(headroom=0.1) == (0.01, 0.999)
    both = {"lending": {"quantile": 0.9, "shortage_target": 0.01}}
    problem(fleet.http.patch("/v1/pools/inference", json=both), 422)


def test_idle_inference_nodes_are_lent_and_listed(fleet: ApiService) -> None:
    fleet.lend_all()
    loans = fleet.get("/v1/loans")["items"]
    assert [loan["node"] for loan in loans] == ["i1", "i0"]
    assert all(loan["is_live"] for loan in loans)
    assert fleet.get("/v1/loans", state="returned")["items"] == []
    assert fleet.get("/v1/pools/inference")["lent_nodes"] == 2


def test_demand_above_capacity_is_accepted_clamped_and_recalls_every_loan(fleet: ApiService) -> None:
    fleet.lend_all()
    body = fleet.made("/v1/pools/inference/demand", {"gpus": 99.5})
    assert body["clamped"] is True
    assert (body["gpus"], body["asked_gpus"], body["capacity_gpus"]) == (2.0, 99.5, 2)
    for _ in range(3):
        fleet.tick()
    states = {loan["state"] for loan in fleet.get("/v1/loans")["items"]}
    assert states <= {"recalled", "returned"}
    codes = [event["code"] for event in fleet.get("/v1/events")["items"]]
    assert "DemandClamped" in codes
    assert codes.count("NodeRecalled") == 2


def test_demand_is_read_back_with_its_history(fleet: ApiService) -> None:
    fleet.made("/v1/pools/inference/demand", {"gpus": 1, "at": fleet.clock.now_s() - 60})
    fleet.tick()
    fleet.made("/v1/pools/inference/demand", {"gpus": 2})
    body = fleet.get("/v1/pools/inference/demand")
    assert body["latest"]["gpus"] == 2
    assert [reading["gpus"] for reading in body["readings"]] == [1]
    assert fleet.get("/v1/pools/inference/demand", since_s=fleet.clock.now_s())["readings"] == []
    assert fleet.get("/v1/pools/inference/forecast") == {"pool": "inference", "forecast": None}


def test_demand_out_of_order_or_in_the_future_is_refused(fleet: ApiService) -> None:
    now_s = fleet.clock.now_s()
    fleet.made("/v1/pools/inference/demand", {"gpus": 1, "at": now_s})
    for at_s in (now_s - 1, now_s + DAY_S):
        body = fleet.refused("POST", "/v1/pools/inference/demand", {"gpus": 1, "at": at_s})
        assert body["errors"][0]["field"] == "at"


def test_weeks_of_readings_are_back_filled_with_one_request(fleet: ApiService) -> None:
    now_s = fleet.made("/v1/pools/inference/demand", {"gpus": 1})["at_s"]
    readings = [{"at": now_s - 300.0 * at, "gpus": at % 4} for at in range(1, 5001)]
    answer = fleet.made("/v1/pools/inference/demand", {"readings": [*readings, readings[0] | {"gpus": 2.5}]})
    assert (answer["accepted"], answer["backfilled"], answer["clamped_readings"]) == (5000, 5000, 1251)
    assert (answer["at_s"], answer["gpus"]) == (now_s, 1.0)
    fleet.tick()
    kept = fleet.get("/v1/pools/inference/demand", since_s=0)["readings"]
    assert len(kept) == 5001
    assert [reading["asked_gpus"] for reading in kept[-2:]] == [2.5, 1.0]


def test_newest_of_many_readings_becomes_the_present_demand(fleet: ApiService) -> None:
    now_s = fleet.made("/v1/pools/inference/demand", {"gpus": 1, "at": 1000.0})["at_s"]
    later = [{"at": now_s + 60.0, "gpus": 9}, {"at": now_s + 30.0, "gpus": 0}, {"at": now_s, "gpus": 7}]
    answer = fleet.made("/v1/pools/inference/demand", {"readings": later})
    assert (answer["accepted"], answer["backfilled"], answer["clamped_readings"]) == (2, 1, 1)
    assert (answer["at_s"], answer["gpus"], answer["clamped"]) == (now_s + 60.0, 2.0, True)


def test_many_readings_are_refused_by_field(fleet: ApiService) -> None:
    def field(document: object) -> str:
        return str(fleet.refused("POST", "/v1/pools/inference/demand", document)["errors"][0]["field"])

    assert field({"readings": []}) == "readings"
    assert field({"gpus": 1, "readings": [{"at": 1, "gpus": 1}]}) == "gpus"
    assert field({"at": 1, "readings": [{"at": 1, "gpus": 1}]}) == "at"
    assert field({}) == "gpus"
    assert field({"readings": [{"at": 1, "gpus": 1}, {"at": 1e12, "gpus": 1}]}) == "readings.1.at"
    assert field({"readings": [{"at": 1, "gpus": -1}]}) == "readings.0.gpus"


def test_a_demand_source_is_set_shown_and_deleted(fleet: ApiService, problem: Problem) -> None:
    preset = {"preset": "vllm", "selector": {"model_name": "chat"}, "gpus_per_replica": 8, "requests_per_replica": 256}
    queries = [{"promql": "sum(gpus)"}, {"promql": "replicas", "unit": "replicas", "gpus_per_replica": 4}, preset]
    path = "/v1/pools/inference/demand-source"
    assert fleet.http.put(path, json={"queries": queries}).status_code == 202
    source = fleet.get("/v1/pools/inference")["demand_source"]
    assert source["stale_after_s"] == 300.0
    assert source["queries"] == [
        {"promql": "sum(gpus)", "unit": "gpus"},
        {"promql": "replicas", "unit": "replicas", "gpus_per_replica": 4.0},
        {**preset, "replicas_min": 1},
    ]
    waiting = fleet.store.count_pending_commands()
    assert fleet.http.put(path, json=source).status_code == 202
    assert fleet.store.count_pending_commands() == waiting
    assert fleet.http.delete(path).status_code == 202
    assert fleet.get("/v1/pools/inference")["demand_source"] is None
    problem(fleet.http.put("/v1/pools/training/demand-source", json={"queries": queries}), 409)


def test_gpu_utilisation_is_refused_as_a_source(fleet: ApiService) -> None:
    queries = {"queries": [{"promql": "avg(DCGM_FI_DEV_GPU_UTIL) / 100", "unit": "gpus"}]}
    body = fleet.refused("PUT", "/v1/pools/inference/demand-source", queries)
    assert body["errors"][0]["field"] == "queries.0.promql"
    assert "batching" in body["errors"][0]["allowed"]


def test_a_training_pool_has_no_demand(fleet: ApiService, problem: Problem) -> None:
    problem(fleet.post("/v1/pools/training/demand", {"gpus": 1}), 409)
    problem(fleet.http.get("/v1/pools/training/forecast"), 409)
    problem(fleet.post("/v1/pools/nowhere/demand", {"gpus": 1}), 404)


def test_lending_is_paused_resumed_and_recalled_with_one_request_each(fleet: ApiService) -> None:
    fleet.tick()
    assert fleet.made("/v1/lending:pause")["lending_paused"] is True
    assert fleet.made("/v1/lending:resume")["lending_paused"] is False
    assert fleet.made("/v1/lending:recall-all")["loans_recalled"] is True
    sent = [type(command.body) for command in fleet.store.load().inbox]
    assert sent == [PauseLending, ResumeLending, RecallAll]


def test_decisions_and_events_are_read_page_by_page(fleet: ApiService) -> None:
    fleet.lend_all()
    decisions = fleet.get("/v1/decisions")["items"]
    assert {"LendNode"} <= {decision["kind"] for decision in decisions}
    everything = [event["number"] for event in fleet.get("/v1/events")["items"]]
    numbers, cursor = [], ""
    while True:
        page = fleet.get("/v1/events", limit=2, cursor=cursor)
        numbers += [event["number"] for event in page["items"]]
        if page["next"] is None:
            break
        cursor = page["next"]
    assert numbers == everything == sorted(numbers)
    assert fleet.get("/v1/events", after=everything[-1])["items"] == []
    assert {event["subject"] for event in fleet.get("/v1/events", subject="i0")["items"]} == {"i0"}


def test_an_unknown_pool_or_node_is_a_404(service: ApiService, problem: Problem) -> None:
    problem(service.http.get("/v1/pools/nowhere"), 404)
    problem(service.http.delete("/v1/pools/nowhere"), 404)
    problem(service.http.get("/v1/nodes/nobody"), 404)
    problem(service.http.get("/v1/nodes?pool=nowhere"), 404)
    for verb in ("cordon", "drain", "uncordon"):
        problem(service.post(f"/v1/nodes/nobody:{verb}"), 404)
