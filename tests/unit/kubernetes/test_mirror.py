"""A mirror hears the same changes from two sides, in any order, and ends up as the server is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.kubernetes.api_objects import POD, Object, ObjectKey
from scheduler.kubernetes.client import ADDED, BOOKMARK, DELETED, MODIFIED, ObjectList, WatchEvent
from scheduler.kubernetes.object_cache import ObjectCache


def a_thing(name: str, version: int, *, uid: str = "", **labels: str) -> Object:
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


def test_it_is_synced_by_its_first_list() -> None:
    mirror = ObjectCache(POD)
    assert not mirror.wait_for_sync(0)
    mirror.replace(listed(7))
    assert mirror.has_synced
    assert mirror.resource_version == 7


def test_what_we_wrote_is_seen_at_once_and_not_undone_by_what_is_older() -> None:
    mirror = synced(5, a_thing("a", 3))
    mirror.assume(a_thing("a", 9))
    mirror.handle_event(WatchEvent(MODIFIED, a_thing("a", 7)))
    assert versions(mirror) == {"a": 9}
    mirror.replace(listed(8, a_thing("a", 7)))
    assert versions(mirror) == {"a": 9}


def test_an_answer_that_comes_late_does_not_bring_back_what_was_deleted() -> None:
    mirror = synced(5, a_thing("a", 3))
    mirror.handle_event(WatchEvent(DELETED, a_thing("a", 8)))
    mirror.assume(a_thing("a", 7))
    assert versions(mirror) == {}


def test_a_bookmark_is_knowledge_too() -> None:
    mirror = synced(5)
    mirror.handle_event(bookmark(20))
    mirror.assume(a_thing("a", 12))
    assert versions(mirror) == {}
    mirror.assume(a_thing("b", 21))
    assert versions(mirror) == {"b": 21}


def test_what_we_deleted_is_not_revived_by_changes_still_on_their_way() -> None:
    mirror = synced(5, a_thing("a", 3))
    mirror.assume_deleted(a_thing("a", 3))
    mirror.handle_event(WatchEvent(MODIFIED, a_thing("a", 6)))
    assert versions(mirror) == {}
    mirror.handle_event(WatchEvent(DELETED, a_thing("a", 8)))
    assert versions(mirror) == {}


def test_a_successor_of_the_same_name_outlives_the_late_end_of_its_predecessor() -> None:
    mirror = synced(5, a_thing("a", 3, uid="first"))
    mirror.assume_deleted(a_thing("a", 3, uid="first"))
    mirror.assume(a_thing("a", 9, uid="second"))
    mirror.handle_event(WatchEvent(DELETED, a_thing("a", 8, uid="first")))
    assert versions(mirror) == {"a": 9}
    mirror.assume_deleted(a_thing("a", 3, uid="first"))
    assert versions(mirror) == {"a": 9}


def test_a_list_takes_away_what_it_lacks_but_not_what_was_written_after_it() -> None:
    mirror = synced(5, a_thing("a", 3), a_thing("b", 4))
    mirror.assume(a_thing("new", 12))
    mirror.replace(listed(10, a_thing("b", 4)))
    assert versions(mirror) == {"b": 4, "new": 12}


def test_a_list_older_than_what_was_told_is_of_a_restored_back_up_and_counts() -> None:
    mirror = synced(50, a_thing("a", 30), a_thing("b", 40))
    mirror.replace(listed(35, a_thing("a", 20)))
    assert versions(mirror) == {"a": 20}
    mirror.assume(a_thing("c", 36))
    assert versions(mirror) == {"a": 20, "c": 36}


def test_the_index_follows_labels_that_change() -> None:
    mirror = synced(5, a_thing("a", 3, job="x"), a_thing("b", 4, job="x"), a_thing("c", 5))
    assert [item["metadata"]["name"] for item in mirror.list_by_label("job", "x")] == ["a", "b"]
    mirror.handle_event(WatchEvent(MODIFIED, a_thing("a", 6, job="y")))
    mirror.handle_event(WatchEvent(DELETED, a_thing("b", 7, job="x")))
    assert mirror.list_by_label("job", "x") == ()
    assert [item["metadata"]["name"] for item in mirror.list_by_label("job", "y")] == ["a"]


def test_a_snapshot_stands_still_and_is_the_same_while_nothing_changes() -> None:
    mirror = synced(5, a_thing("a", 3))
    before = mirror.snapshot()
    mirror.handle_event(bookmark(6))
    assert mirror.snapshot() is before
    mirror.assume(a_thing("b", 9))
    assert set(before) == {("ns", "a")}
    assert set(mirror.snapshot()) == {("ns", "a"), ("ns", "b")}


def test_each_change_is_counted_and_told_once() -> None:
    told: list[ObjectKey] = []
    mirror = ObjectCache(POD, on_change=told.append)
    mirror.replace(listed(5, a_thing("a", 3)))
    mirror.handle_event(WatchEvent(ADDED, a_thing("b", 6)))
    mirror.assume(a_thing("b", 6))
    changes = mirror.change_count
    mirror.replace(listed(6, a_thing("a", 3), a_thing("b", 6)))
    assert told == [("ns", "a"), ("ns", "b")]
    assert mirror.change_count == changes


def test_it_keeps_no_record_of_who_wrote_which_field() -> None:
    item = a_thing("a", 3, job="x")
    item["metadata"]["managedFields"] = [{"manager": "ebbtide"}]
    assert synced(5, item).get("a", "ns") == a_thing("a", 3, job="x")
    assert "managedFields" in item["metadata"]


STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["write", "delete"])), max_size=12)


@given(STEPS, st.data())
def test_whatever_comes_first_the_mirror_ends_as_the_server(steps: list[tuple[str, str]], data: st.DataObject) -> None:
    """The server's history is told by the watch in order, while the answers to any of its writes arrive at any time,
    and a relist may come in between."""
    server: dict[str, Object] = {}
    told: list[WatchEvent] = []
    answers: list[Object] = []
    lists: list[ObjectList] = [listed(1)]
    for version, (name, step) in enumerate(steps, 2):
        held = server.get(name)
        if step == "write":
            uid = held["metadata"]["uid"] if held else f"{name} born {version}"
            server[name] = a_thing(name, version, uid=uid, job=str(version % 2))
            answers.append(server[name])
            told.append(WatchEvent(MODIFIED if held else ADDED, server[name]))
        elif held:
            del server[name]
            told.append(WatchEvent(DELETED, a_thing(name, version, uid=held["metadata"]["uid"])))
        else:
            told.append(bookmark(version))
        lists.append(listed(version, *server.values()))
    mirror = synced(1)
    for index, event in enumerate(told):
        for answer in answers:
            # An answer cannot come before its write, but may come before or long after the watch tells of it.
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
