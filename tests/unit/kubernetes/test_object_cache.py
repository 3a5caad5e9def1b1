"""ObjectCache with watch events and own writes in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.kubernetes.api_objects import POD, Object, ObjectKey
from scheduler.kubernetes.client import ADDED, BOOKMARK, DELETED, MODIFIED, ObjectList, WatchEvent
from scheduler.kubernetes.object_cache import ObjectCache


def build_object(name: str, version: int, *, uid: str = "", **labels: str) -> Object:
    metadata = {"name": name, "namespace": "ns", "uid": uid or f"uid of {name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": labels}}


def bookmark(version: int) -> WatchEvent:
    return WatchEvent(BOOKMARK, {"metadata": {"resourceVersion": str(version)}})


def listed(version: int, *items: Object) -> ObjectList:
    return ObjectList(items, str(version))


def synced(version: int, *items: Object) -> ObjectCache:
    mirror = ObjectCache(POD, indexed_labels=["job"])
    mirror.replace(listed(version, *items))
    return mirror


def versions(mirror: ObjectCache) -> dict[str, int]:
    return {name: int(item["metadata"]["resourceVersion"]) for (_, name), item in mirror.snapshot().items()}


def test_first_list_syncs_the_cache() -> None:
    mirror = ObjectCache(POD)
    assert not mirror.wait_for_sync(0)
    mirror.replace(listed(7))
    assert mirror.has_synced
    assert mirror.resource_version == 7


def test_own_write_is_visible_and_not_undone_by_older_events() -> None:
    mirror = synced(5, build_object("a", 3))
    mirror.assume(build_object("a", 9))
    mirror.handle_event(WatchEvent(MODIFIED, build_object("a", 7)))
    assert versions(mirror) == {"a": 9}
    mirror.replace(listed(8, build_object("a", 7)))
    assert versions(mirror) == {"a": 9}


def test_late_response_does_not_revive_a_deleted_object() -> None:
    mirror = synced(5, build_object("a", 3))
    mirror.handle_event(WatchEvent(DELETED, build_object("a", 8)))
    mirror.assume(build_object("a", 7))
    assert versions(mirror) == {}


def test_bookmark_advances_the_version() -> None:
    mirror = synced(5)
    mirror.handle_event(bookmark(20))
    mirror.assume(build_object("a", 12))
    assert versions(mirror) == {}
    mirror.assume(build_object("b", 21))
    assert versions(mirror) == {"b": 21}


def test_own_deletion_is_not_undone_by_late_events() -> None:
    mirror = synced(5, build_object("a", 3))
    mirror.assume_deleted(build_object("a", 3))
    mirror.handle_event(WatchEvent(MODIFIED, build_object("a", 6)))
    assert versions(mirror) == {}
    mirror.handle_event(WatchEvent(DELETED, build_object("a", 8)))
    assert versions(mirror) == {}


def test_successor_survives_late_deletion_of_its_predecessor() -> None:
    mirror = synced(5, build_object("a", 3, uid="first"))
    mirror.assume_deleted(build_object("a", 3, uid="first"))
    mirror.assume(build_object("a", 9, uid="second"))
    mirror.handle_event(WatchEvent(DELETED, build_object("a", 8, uid="first")))
    assert versions(mirror) == {"a": 9}
    mirror.assume_deleted(build_object("a", 3, uid="first"))
    assert versions(mirror) == {"a": 9}


def test_list_removes_missing_objects_but_not_newer_ones() -> None:
    mirror = synced(5, build_object("a", 3), build_object("b", 4))
    mirror.assume(build_object("new", 12))
    mirror.replace(listed(10, build_object("b", 4)))
    assert versions(mirror) == {"b": 4, "new": 12}


def test_older_list_after_a_restore_replaces_the_cache() -> None:
    mirror = synced(50, build_object("a", 30), build_object("b", 40))
    mirror.replace(listed(35, build_object("a", 20)))
    assert versions(mirror) == {"a": 20}
    mirror.assume(build_object("c", 36))
    assert versions(mirror) == {"a": 20, "c": 36}


def test_index_follows_label_changes() -> None:
    mirror = synced(5, build_object("a", 3, job="x"), build_object("b", 4, job="x"), build_object("c", 5))
    assert [item["metadata"]["name"] for item in mirror.list_by_label("job", "x")] == ["a", "b"]
    mirror.handle_event(WatchEvent(MODIFIED, build_object("a", 6, job="y")))
    mirror.handle_event(WatchEvent(DELETED, build_object("b", 7, job="x")))
    assert mirror.list_by_label("job", "x") == ()
    assert [item["metadata"]["name"] for item in mirror.list_by_label("job", "y")] == ["a"]


def test_snapshot_is_immutable_and_reused() -> None:
    mirror = synced(5, build_object("a", 3))
    before = mirror.snapshot()
    mirror.handle_event(bookmark(6))
    assert mirror.snapshot() is before
    mirror.assume(build_object("b", 9))
    assert set(before) == {("ns", "a")}
    assert set(mirror.snapshot()) == {("ns", "a"), ("ns", "b")}


def test_each_change_is_counted_and_notified_once() -> None:
    reported: list[ObjectKey] = []
    mirror = ObjectCache(POD, on_change=reported.append)
    mirror.replace(listed(5, build_object("a", 3)))
    mirror.handle_event(WatchEvent(ADDED, build_object("b", 6)))
    mirror.assume(build_object("b", 6))
    changes = mirror.change_count
    mirror.replace(listed(6, build_object("a", 3), build_object("b", 6)))
    assert reported == [("ns", "a"), ("ns", "b")]
    assert mirror.change_count == changes


def test_managed_fields_are_stripped() -> None:
    item = build_object("a", 3, job="x")
    item["metadata"]["managedFields"] = [{"manager": "ebbtide"}]
    assert synced(5, item).get("a", "ns") == build_object("a", 3, job="x")
    assert "managedFields" in item["metadata"]


STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["write", "delete"])), max_size=12)


@given(STEPS, st.data())
def test_cache_converges_for_any_order_of_events(steps: list[tuple[str, str]], data: st.DataObject) -> None:
    """The watch delivers the server's history in order, responses to writes arrive at any time, and lists may come in
    between.
    """
    server: dict[str, Object] = {}
    reported: list[WatchEvent] = []
    answers: list[Object] = []
    lists: list[ObjectList] = [listed(1)]
    for version, (name, step) in enumerate(steps, 2):
        held = server.get(name)
        if step == "write":
            uid = held["metadata"]["uid"] if held else f"{name} born {version}"
            server[name] = build_object(name, version, uid=uid, job=str(version % 2))
            answers.append(server[name])
            reported.append(WatchEvent(MODIFIED if held else ADDED, server[name]))
        elif held:
            del server[name]
            reported.append(WatchEvent(DELETED, build_object(name, version, uid=held["metadata"]["uid"])))
        else:
            reported.append(bookmark(version))
        lists.append(listed(version, *server.values()))
    mirror = synced(1)
    for index, event in enumerate(reported):
        for answer in answers:
            # A response follows its write, but may precede or follow the watch event.
            if data.draw(st.booleans()):
                mirror.assume(answer)
        if data.draw(st.integers(0, 5)) == 0:
            mirror.replace(lists[index])
        mirror.handle_event(event)
    for answer in data.draw(st.permutations(answers)):
        mirror.assume(answer)
    assert {name: item for (_, name), item in mirror.snapshot().items()} == server
    for value in ("0", "1"):
        labelled = [item["metadata"]["name"] for item in mirror.list_by_label("job", value)]
        assert labelled == sorted(n for n, item in server.items() if item["metadata"]["labels"]["job"] == value)
