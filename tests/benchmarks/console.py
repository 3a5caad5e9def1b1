"""The console in Chromium on loopback, with 1,000 nodes and 5,000 live jobs: first paint, updates, and each page.

Pages are loaded with 100,000 ended jobs, 200 queues and 30 days of history in SQLite. A page is complete with the last
change of its contents before the page was quiet.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from scheduler.domain.fleet import NodeState
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.console.console_site import ConsoleSite
from tests.console.fleets import LARGE_JOBS, LARGE_NODES, commit_nodes, large_site, large_store
from tests.console.past_use import add_past_use
from tests.ended_jobs import add_ended_jobs

LOADS, UPDATES = 7, 15
CHANGED_NODES = 20
REST_MS = 800
PAGE_LOADS, QUIET_MS = 3, 4000
ENDED_JOBS, QUEUES, DAYS = 100_000, 200, 30
PAGES = (
    *("", "nodes", "nodes/i3", "pools", "pools/inference", "loans", "alerts", "jobs", "jobs/job-0001", "queues"),
    *("queues/team-3", "submit", "gantt", "savings", "plans", "simulate", "decisions", "audit", "tokens", "secrets"),
    *("webhooks", "settings"),
)
_NOTE_CHANGES = """() => addEventListener("DOMContentLoaded", () => {
    const isAge = (node) => (node.nodeType === Node.TEXT_NODE ? node.parentElement : node)?.closest("time");
    const note = (changes) => {
        if (changes.some(({ target }) => !isAge(target))) window.changedMs = performance.now();
    };
    const all = { subtree: true, childList: true, characterData: true, attributes: true };
    new MutationObserver(note).observe(document.getElementById("main"), all);
})"""
_DRAWN = f"() => document.querySelectorAll('.cell').length === {LARGE_NODES}"
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
_LAST_CELL_MS = f"""() => new Promise((done) => {{
    const look = () => {_DRAWN[6:]} ? requestAnimationFrame(() => done(performance.now())) : setTimeout(look, 2);
    look();
}})"""
_WATCH = """() => {
    window.drawn = new Promise((done) => {
        const note = () => { requestAnimationFrame(() => done(Date.now())); };
        const watch = new MutationObserver(() => { watch.disconnect(); note(); });
        const all = { subtree: true, attributes: true };
        for (const list of document.querySelectorAll(".nodes")) watch.observe(list, all);
    });
}"""


def rows() -> Iterator[tuple[str, str, str]]:
    """Return (name, target, measured)."""
    with TemporaryDirectory() as folder, launched_chromium() as browser:
        with closing(large_site(Path(folder))) as site:
            yield from _rows(site, browser)
        with closing(build_site_with_history(Path(folder))) as site:
            yield from _page_rows(site, browser)


@contextmanager
def launched_chromium() -> Iterator[Browser]:
    """Run Chromium. Raises FileNotFoundError if it is not installed."""
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError(2, "not installed", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def build_site_with_history(folder: Path) -> ConsoleSite:
    url = f"sqlite:///{folder / 'history.sqlite'}"
    migrate(url)
    store, snapshot = SqlStore(url), large_store().load().snapshot
    queues = {f"team-{at}": JobQueue(f"team-{at}", guaranteed_gpus=20) for at in range(QUEUES)}
    site = ConsoleSite(store, snapshot.nodes.values(), now_s=time.time(), folder=folder / "history")
    epoch = site.lead().epoch
    store.commit(Commit(Snapshot(), replace(snapshot, queues=queues), epoch))
    add_ended_jobs(url, ENDED_JOBS)
    add_past_use(store, time.time(), days=DAYS, nodes=LARGE_NODES // 2, epoch=epoch)
    return site


def _page_rows(site: ConsoleSite, browser: Browser) -> Iterator[tuple[str, str, str]]:
    for path in PAGES:
        complete_ms, paints_ms, sizes = list[float](), list[float](), list[int]()
        for _ in range(PAGE_LOADS):
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            loaded = _bytes_loaded(page)
            page.add_init_script(f"({_NOTE_CHANGES})()")
            page.goto(f"{site.url}/#/{path}")
            page.wait_for_timeout(QUIET_MS)
            complete_ms.append(page.evaluate("window.changedMs"))
            paints_ms.append(page.evaluate(_PAINT))
            sizes.append(int(sum(loaded)))
            page.context.close()
        name = f"page {path or 'overview'}: first paint; complete; bytes"
        yield name, "1 s; 2 s; 400 KB", f"{_ms(paints_ms)}; {_ms(complete_ms)}; {max(sizes) / 1e3:.0f} KB"


def _rows(site: ConsoleSite, browser: Browser) -> Iterator[tuple[str, str, str]]:
    of = f"overview of {LARGE_NODES:,} nodes and {LARGE_JOBS:,} jobs"
    paints_ms, drawn_ms, sizes = list[float](), list[float](), list[int]()
    for _ in range(LOADS):
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        loaded = _bytes_loaded(page)
        page.goto(site.url)
        drawn_ms.append(page.evaluate(_LAST_CELL_MS))
        paints_ms.append(page.evaluate(_PAINT))
        page.wait_for_timeout(REST_MS)
        sizes.append(int(sum(loaded)))
        page.context.close()
    yield f"{of}: first paint", "< 1 s", _ms(paints_ms)
    yield f"{of}: all nodes drawn", "", _ms(drawn_ms)
    yield f"{of}: bytes of the page, its files and data", "< 400 KB", f"{max(sizes) / 1e3:.0f} KB"
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    page.goto(site.url)
    page.wait_for_function(_DRAWN)
    seen_ms, busy_ms = _updates(site, page)
    yield f"{of}: {CHANGED_NODES} nodes change: the page's work", "< 100 ms", _ms(busy_ms)
    yield f"{of}: the same, from the commit to the frame that shows it", "< 100 ms", _ms(seen_ms)


def _bytes_loaded(page: Page) -> list[float]:
    """Return bodies and headers of the responses as sent, without the endless event stream."""
    loaded = list[float]()
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.enable")
    devtools.on("Network.loadingFinished", lambda told: loaded.append(told["encodedDataLength"]))
    return loaded


def _updates(site: ConsoleSite, page: Page) -> tuple[list[float], list[float]]:
    """Return the time from the commit to the frame, and the CPU time of the page's main thread, both in ms.

    The CPU time is less sensitive to other work on the machine.
    """
    seen_ms, busy_ms = list[float](), list[float]()
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    for round_number in range(UPDATES):
        page.wait_for_timeout(REST_MS)
        page.evaluate(_WATCH)
        before_s = _measure_main_thread_s(devtools.send("Performance.getMetrics"))
        state = NodeState.UP if round_number % 2 else NodeState.DOWN
        begin_ms = 1e3 * time.time()
        commit_nodes(site, {f"t{at}": state for at in range(100, 100 + CHANGED_NODES)})
        seen_ms.append(page.evaluate("drawn") - begin_ms)
        page.wait_for_timeout(REST_MS)
        busy_ms.append(1e3 * (_measure_main_thread_s(devtools.send("Performance.getMetrics")) - before_s))
    return seen_ms, busy_ms


def _measure_main_thread_s(told: dict[str, Any]) -> float:
    return float(next(each["value"] for each in told["metrics"] if each["name"] == "TaskDuration"))


def _ms(times_ms: list[float]) -> str:
    return f"{median(times_ms):.0f} ms, most {max(times_ms):.0f} ms"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
