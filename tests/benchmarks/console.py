"""The console in Chromium on loopback, with 1,000 nodes and 5,000 jobs: first paint, updates, bytes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from scheduler.domain.fleet import NodeState
from tests.console.console_site import ConsoleSite
from tests.console.fleets import LARGE_JOBS, LARGE_NODES, commit_nodes, large_site

LOADS, UPDATES = 7, 15
CHANGED_NODES = 20
REST_MS = 800
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
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError(2, "not installed", "chromium")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        site = large_site(Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield from _rows(site, browser)
        finally:
            browser.close()
            site.close()


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
    yield f"{of}: bytes of the page, its files and data", "< 300 KB", f"{max(sizes) / 1e3:.0f} KB"
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
