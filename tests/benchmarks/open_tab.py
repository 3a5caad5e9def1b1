"""Tabs of the console that stay open for an hour: their memory, and the CPU time that they cost the API.

The fleet has 1,000 nodes, 5,000 live and 100,000 ended jobs, 200 queues and 30 days of history in SQLite. Each five
seconds 20 nodes and 20 jobs change, as a tick commits them. The API's CPU time per tab is the time of all threads of
this process except the one that commits, less what the same API costs without a tab, by the number of tabs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Browser, CDPSession

from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import NodeState
from scheduler.domain.job_state import JobState
from scheduler.store.protocol import Commit
from tests.benchmarks.console import build_site_with_history, launched_chromium
from tests.console.console_site import ConsoleSite

HOUR_S, SETTLED_S, WITHOUT_S = 3600.0, 600.0, 300.0
EVERY_S = 5.0
CHANGED = 20
PAGES = ("", "jobs")


def rows() -> Iterator[tuple[str, str, str]]:
    """Return (name, target, measured)."""
    with (
        TemporaryDirectory() as folder,
        launched_chromium() as browser,
        closing(build_site_with_history(Path(folder))) as site,
    ):
        yield from _rows(site, browser)


def _rows(site: ConsoleSite, browser: Browser) -> Iterator[tuple[str, str, str]]:
    fleet = _ChangingFleet(site)
    without = fleet.run(WITHOUT_S)
    pages = [browser.new_context(viewport={"width": 1440, "height": 900}).new_page() for _ in PAGES]
    for page, path in zip(pages, PAGES, strict=True):
        page.goto(f"{site.url}/#/{path}")
    devtools = [page.context.new_cdp_session(page) for page in pages]
    fleet.run(SETTLED_S, wait_ms=pages[0].wait_for_timeout)
    early = [_measure_memory(each) for each in devtools]
    cores = fleet.run(HOUR_S - SETTLED_S, wait_ms=pages[0].wait_for_timeout) - without
    late = [_measure_memory(each) for each in devtools]
    yield "the API's CPU per tab", "5% of a core", f"{cores / len(PAGES):.1%}"
    for path, before, after in zip(PAGES, early, late, strict=True):
        for what in before:
            name = f"{path or 'overview'}: {what} after 10 and 60 minutes"
            yield name, "flat", f"{before[what]:,.1f} and {after[what]:,.1f}"


class _ChangingFleet:
    """Commits a change of nodes and jobs each five seconds, as a controller's ticks do."""

    def __init__(self, site: ConsoleSite) -> None:
        self._site = site
        self._round = 0

    def run(self, seconds: float, wait_ms: Any = lambda wanted_ms: time.sleep(wanted_ms / 1e3)) -> float:
        """Commit for some time. Returns the cores that other threads of this process used meanwhile."""
        begin_s, began_s = time.monotonic(), time.process_time() - time.thread_time()
        while (left_s := begin_s + seconds - time.monotonic()) > 0.0:
            self._commit()
            wait_ms(1e3 * min(EVERY_S, max(0.1, left_s)))
        used_s = time.process_time() - time.thread_time() - began_s
        return used_s / (time.monotonic() - begin_s)

    def _commit(self) -> None:
        self._round += 1
        before = self._site.store.load().snapshot
        now_s = time.time()
        nodes, jobs = dict(before.nodes), dict(before.jobs)
        state = NodeState.DOWN if self._round % 2 else NodeState.UP
        for at in range(CHANGED):
            name = f"t{100 + at}"
            nodes[name] = replace(nodes[name], state=state)
        running = [job for job in jobs.values() if job.state is JobState.RUNNING]
        for job in running[self._round % 50 :: 50][:CHANGED]:
            jobs[job.id] = replace(job, progress=replace(job.progress, at_s=now_s, steps=job.progress.steps + 1.0))
        events = tuple(Event(now_s, EventCode.NODE_CHANGED, f"t{100 + at}", str(state)) for at in range(CHANGED))
        after = replace(before, generation=before.generation + 1, now_s=now_s, nodes=nodes, jobs=jobs)
        assert self._site.leader is not None
        self._site.store.commit(Commit(before, after, self._site.leader.epoch, events=events))


def _measure_memory(devtools: CDPSession) -> dict[str, float]:
    """Return the size of the heap and the number of DOM nodes and listeners, after a garbage collection."""
    devtools.send("HeapProfiler.collectGarbage")
    counters = devtools.send("Memory.getDOMCounters")
    heap = devtools.send("Runtime.getHeapUsage")["usedSize"] / 1e6
    return {"heap, MB": heap, "DOM nodes": counters["nodes"], "listeners": counters["jsEventListeners"]}
