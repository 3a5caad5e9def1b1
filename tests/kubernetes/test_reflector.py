"""Reflector and ObjectCache through restarts, silence and expired history."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import CONFIG_MAP, ObjectKey, name_of, uid_of, version_of
from scheduler.kubernetes.client import ADDED, BOOKMARK, DELETED, MODIFIED, KubernetesClient, WatchEvent, connect
from scheduler.kubernetes.object_cache import ObjectCache
from scheduler.kubernetes.reflector import Reflector
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fault_proxy import FAULTLESS, Fault, FaultProxy
from tests.kubernetes.objects import build_config_map
from tests.kubernetes.waiting import eventually

SILENCE_S = 3.0
Start = Callable[..., Reflector]


@pytest.fixture
def start(cluster: KubernetesClient, namespace: str) -> Iterator[Start]:
    started: list[Reflector] = []

    def begin(*, silence_s: float = SILENCE_S, on_change: Callable[[ObjectKey], None] = lambda key: None) -> Reflector:
        mirror = ObjectCache(CONFIG_MAP, namespace=namespace, indexed_labels=["job"], on_change=on_change)
        watcher = Reflector(cluster, mirror, idle_timeout_s=silence_s)
        watcher.start()
        started.append(watcher)
        assert mirror.wait_for_sync(30)
        return watcher

    yield begin
    for each in started:
        each.stop()


def names(watcher: Reflector) -> set[str]:
    return {name for _, name in watcher.cache.snapshot()}


def is_like(watcher: Reflector, cluster: KubernetesClient) -> bool:
    mirror = watcher.cache
    truth = cluster.list(CONFIG_MAP, namespace=mirror.namespace).items
    held = mirror.snapshot()
    return {(name_of(item), version_of(item)) for item in truth} == {
        (name_of(item), version_of(item)) for item in held.values()
    }


def test_changes_arrive_in_order_with_bookmarks(cluster: KubernetesClient, namespace: str) -> None:
    since = cluster.list(CONFIG_MAP, namespace=namespace).resource_version
    watch = cluster.watch(CONFIG_MAP, resource_version=since, namespace=namespace, timeout_s=8.0)
    created = cluster.create(CONFIG_MAP, build_config_map("a", namespace))
    cluster.patch(CONFIG_MAP, "a", namespace, change={"data": {"k": "v"}})
    cluster.delete(CONFIG_MAP, "a", namespace)
    events = list(watch)
    assert [event.type for event in events[:3]] == [ADDED, MODIFIED, DELETED]
    assert events[0].object == created
    assert {event.type for event in events[3:]} == {BOOKMARK}
    versions = [version_of(event.object) for event in events]
    assert versions == sorted(versions)


def test_watch_is_closed_by_another_thread(cluster: KubernetesClient, namespace: str) -> None:
    watch = cluster.watch(CONFIG_MAP, resource_version=cluster.list(CONFIG_MAP).resource_version, namespace=namespace)
    events: list[WatchEvent] = []
    reading = threading.Thread(target=lambda: events.extend(watch))
    reading.start()
    time.sleep(0.3)
    watch.close()
    reading.join(30)
    assert not reading.is_alive()
    watch.close()


def test_expired_version_is_gone(control_plane: ControlPlane, cluster: KubernetesClient, namespace: str) -> None:
    cluster.create(CONFIG_MAP, build_config_map("a", namespace))
    control_plane.forget_past()
    with pytest.raises(ApiError) as caught:
        list(cluster.watch(CONFIG_MAP, resource_version="1", timeout_s=4.0))
    assert caught.value.is_gone


def test_cache_follows_and_notifies(cluster: KubernetesClient, namespace: str, start: Start) -> None:
    reported: list[ObjectKey] = []
    watcher = start(on_change=reported.append)
    cluster.create(CONFIG_MAP, build_config_map("a", namespace, labels={"job": "x"}))
    cluster.create(CONFIG_MAP, build_config_map("b", namespace))
    cluster.delete(CONFIG_MAP, "b", namespace)
    eventually(lambda: reported == [(namespace, each) for each in ("a", "b", "b")], what=f"three changes, {reported}")
    assert [name_of(item) for item in watcher.cache.list_by_label("job", "x")] == ["a"]
    assert watcher.list_count == 1


def test_assumed_write_notifies_once(cluster: KubernetesClient, namespace: str, start: Start) -> None:
    reported: list[ObjectKey] = []
    watcher = start(on_change=reported.append)
    watcher.cache.assume(cluster.create(CONFIG_MAP, build_config_map("a", namespace)))
    assert names(watcher) == {"a"}
    cluster.create(CONFIG_MAP, build_config_map("z", namespace))
    eventually(lambda: "z" in names(watcher), what="the watch is past it")
    assert reported == [(namespace, "a"), (namespace, "z")]


def test_ended_watch_is_resumed(
    control_plane: ControlPlane, cluster: KubernetesClient, namespace: str, tmp_path: Path
) -> None:
    """Each change happens between the end of one watch and the start of the next."""
    asked: list[float] = []

    def change_unheard(method: str, path: str) -> Fault:
        if "watch=true" in path and len(asked) < 4:
            cluster.create(CONFIG_MAP, build_config_map(f"c{len(asked)}", namespace))
            asked.append(float(parse_qs(path)["timeoutSeconds"][0]))
        return FAULTLESS

    with FaultProxy(control_plane).running() as proxy:
        proxy.fault = change_unheard
        proxy.watch_s = 1
        through = connect(proxy.kubeconfig(tmp_path))
        watcher = Reflector(through, ObjectCache(CONFIG_MAP, namespace=namespace), idle_timeout_s=60.0)
        watcher.start()
        eventually(lambda: names(watcher) == {"c0", "c1", "c2", "c3"}, what="all are seen")
        watcher.stop()
        through.close()
    assert watcher.list_count == 1
    assert all(30.0 < each_s < 60.0 for each_s in asked), "the end asked for comes before silence counts as death"


@pytest.mark.parametrize("end", [ControlPlane.kill_api, ControlPlane.stop_api])
def test_api_server_restart(
    control_plane: ControlPlane,
    cluster: KubernetesClient,
    namespace: str,
    start: Start,
    end: Callable[[ControlPlane], None],
) -> None:
    watcher = start()
    cluster.create(CONFIG_MAP, build_config_map("before", namespace))
    cluster.create(CONFIG_MAP, build_config_map("doomed", namespace))
    eventually(lambda: "doomed" in names(watcher), what="both are seen")
    end(control_plane)
    control_plane.start_api()
    cluster.delete(CONFIG_MAP, "doomed", namespace)
    cluster.create(CONFIG_MAP, build_config_map("after", namespace))
    eventually(lambda: names(watcher) == {"before", "after"}, what="it hears again")
    eventually(lambda: is_like(watcher, cluster) and not watcher.is_stale, what="the mirror is like the server")


def test_expired_history_is_listed_again(
    control_plane: ControlPlane, cluster: KubernetesClient, namespace: str, start: Start
) -> None:
    watcher = start()
    cluster.create(CONFIG_MAP, build_config_map("doomed", namespace))
    eventually(lambda: "doomed" in names(watcher), what="it is seen")
    control_plane.forget_past()
    cluster.delete(CONFIG_MAP, "doomed", namespace)
    control_plane.forget_past()
    eventually(lambda: "doomed" not in names(watcher), what="its end is known")
    eventually(lambda: is_like(watcher, cluster), what="the mirror is like the server")


def test_frozen_server_makes_the_cache_stale(
    control_plane: ControlPlane, cluster: KubernetesClient, namespace: str, start: Start
) -> None:
    watcher = start(silence_s=2.0)
    eventually(lambda: not watcher.is_stale, what="it hears the server")
    control_plane.pause_api()
    try:
        eventually(lambda: watcher.is_stale, what="silence is noticed")
    finally:
        control_plane.resume_api()
    cluster.create(CONFIG_MAP, build_config_map("after", namespace))
    eventually(lambda: "after" in names(watcher) and not watcher.is_stale, what="it hears again")


def test_silent_watches_are_replaced_by_lists(
    control_plane: ControlPlane, cluster: KubernetesClient, namespace: str, tmp_path: Path
) -> None:
    with FaultProxy(control_plane).running() as proxy:
        through = connect(proxy.kubeconfig(tmp_path))
        watcher = Reflector(through, ObjectCache(CONFIG_MAP, namespace=namespace), idle_timeout_s=2.0)
        watcher.start()
        assert watcher.cache.wait_for_sync(30)
        proxy.is_mute = True
        for name in ("first", "second"):
            cluster.create(CONFIG_MAP, build_config_map(name, namespace))
            eventually(partial(_has, watcher, name), what=f"{name} is found out")
        eventually(lambda: not watcher.is_stale, what="lists are signs of life")
        watcher.stop()
        through.close()


def _has(watcher: Reflector, name: str) -> bool:
    return name in names(watcher)


def test_stop_is_fast_with_a_frozen_server(control_plane: ControlPlane, start: Start) -> None:
    quiet, frozen = start(silence_s=60.0), start(silence_s=60.0)
    began_s = time.monotonic()
    quiet.stop()
    control_plane.pause_api()
    try:
        frozen.stop()
    finally:
        control_plane.resume_api()
    assert time.monotonic() - began_s < 20.0


def test_cache_matches_the_server_after_many_changes(cluster: KubernetesClient, namespace: str, start: Start) -> None:
    watcher = start()

    def write(worker: int) -> None:
        for number in range(40):
            name = f"c{number % 5}"
            item = build_config_map(name, namespace, n=f"{worker}.{number}")
            watcher.cache.assume(cluster.apply(CONFIG_MAP, item))
            held = watcher.cache.get(name, namespace)
            if held and number % 3 == worker % 3:
                assert cluster.delete(CONFIG_MAP, name, namespace, uid=uid_of(held)) is None
                watcher.cache.assume_deleted(held)

    writers = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    eventually(lambda: is_like(watcher, cluster), what="the mirror is like the server")
