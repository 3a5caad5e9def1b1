"""Pictures of the console for the README and the documentation: `python -m tests.console.pictures`, or `make pictures`.

A simulated fleet lives through one day of demand and jobs. Then each page is drawn at two widths, in both themes.
`--only overview` draws one page.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.builders import GPU
from tests.console.conftest import CHROMIUM
from tests.console.console_site import ConsoleSite
from tests.console.fleets import create_fleet, small_site

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "images" / "console"
WIDTHS, SCHEMES = (1440, 390), ("light", "dark")
HEIGHT = 900
HOURS, TICK_S = 24.0, 300.0
SETTLE_MS = 1500
"""Time in which charts are drawn after their data has come."""
MISSING = "Page not found"


@dataclass(frozen=True, slots=True)
class ConsolePage:
    """A page, by its path below `#/`. `job` in braces is the id of a running job. With `mark`, only this element."""

    name: str
    path: str
    mark: str = ""


PAGES = (
    ConsolePage("overview", ""),
    ConsolePage("capacity", "", "[aria-label='Capacity over time']"),
    ConsolePage("jobs", "jobs"),
    ConsolePage("job", "jobs/{job}"),
    ConsolePage("gantt", "gantt"),
    ConsolePage("savings", "savings"),
    ConsolePage("queue", "queues/research"),
    ConsolePage("node", "nodes/i3"),
    ConsolePage("what-if", "simulate"),
)
PAST_JOBS = (("tokenizer", 2, 8), ("reranker", 4, 16), ("distill", 8, 24), ("ablation", 8, 16), ("embeddings", 4, 8))
"""Names and GPU ranges of jobs that come and go during the day. One comes every JOB_ROUNDS ticks of five minutes."""
JOB_ROUNDS = 3
PALETTE_COLORS = 96
"""A palette makes a picture a third of its size, and its few colours hardly change."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draw pictures of the console.")
    parser.add_argument("--only", metavar="PAGE", choices=[page.name for page in PAGES], help="Draw this page alone.")
    parser.add_argument("--target", type=Path, default=TARGET, help="Folder of the pictures.")
    options = parser.parse_args(words)
    pages = [page for page in PAGES if options.only in (None, page.name)]
    if CHROMIUM is None:
        parser.error("no Chromium: install chromium-headless-shell")
    options.target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, _play_day(Path(folder)) as site, _open_browser() as browser:
        missing = {page.name for page in pages if not all(_draw(browser, site, page, options.target))}
    for name in sorted(missing):
        print(f"{name}: the console has no such page or element")
    return 1 if missing else 0


@contextmanager
def _play_day(folder: Path) -> Iterator[ConsoleSite]:
    """Yield a site after one day of a daily demand pattern, with jobs that start, grow, fail and end."""
    site = small_site(folder, hours=HOURS)
    try:
        site.jobs = create_fleet(site)
        random, rounds = Random(7), round(HOURS * 3600.0 / TICK_S)
        for at in range(rounds):
            site.demand("inference", 42 + 28 * math.sin(2 * math.pi * at / rounds - 1.2) + random.uniform(-1.5, 1.5))
            if at % JOB_ROUNDS == 1:
                _submit_past_job(site, at, random)
            if at % 70 == 50:
                site.executor.crash_job(random.choice(site.executor.list_running_jobs()))
            site.solve_requested_points(site.tick(after_s=TICK_S - 5.0))
            site.tick(after_s=5.0)
        site.train(site.jobs["llama-pretrain"], range(400, 800, 20))
        yield site
    finally:
        site.close()


def _submit_past_job(site: ConsoleSite, at: int, random: Random) -> None:
    name, least, most = PAST_JOBS[at // JOB_ROUNDS % len(PAST_JOBS)]
    document: dict[str, Any] = {
        "name": f"{name}-{at}",
        "queue": random.choice(("research", "products", "default")),
        "gpu": GPU,
        "gpus": {"min": least, "max": most},
        "steps": random.randrange(10_000, 60_000),
        "onResize": "checkpoint",
        "command": ["python", "train.py"],
    }
    with site.client() as client:
        client.submit(document)


@contextmanager
def _open_browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def _draw(browser: Browser, site: ConsoleSite, page: ConsolePage, target: Path) -> Iterator[bool]:
    """Draw one page at all widths in both themes. Yields whether the page and its element exist."""
    url = f"{site.url}/#/{page.path.format(job=site.jobs['llama-pretrain'])}"
    for width in WIDTHS:
        for scheme in SCHEMES:
            context = browser.new_context(
                color_scheme="dark" if scheme == "dark" else "light", viewport={"width": width, "height": HEIGHT}
            )
            opened = context.new_page()
            opened.goto(url)
            yield _take(opened, page.mark, target / f"{page.name}-{width}-{scheme}.png")
            context.close()


def _take(page: Page, mark: str, file: Path) -> bool:
    page.locator("main h1").first.wait_for()
    page.wait_for_timeout(SETTLE_MS)
    if page.get_by_role("heading", name=MISSING).count() or (mark and not page.locator(mark).count()):
        return False
    is_narrow = page.viewport_size is not None and page.viewport_size["width"] < HEIGHT
    shot = page.locator(mark).first.screenshot() if mark else page.screenshot(full_page=is_narrow)
    picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(PALETTE_COLORS, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
