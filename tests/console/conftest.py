"""A real Chromium for the console's tests, and pages that fail where the browser complains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.web_console import load_console_files
from tests.console.console_site import ConsoleSite
from tests.console.fleets import furnish, large_site, small_site

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).resolve().parents[2] / "api" / "console" / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = Path(__file__).parent / "screenshots"
PATIENCE_MS = 60_000
"""What a page shows is waited for that long: on a machine that runs other tests beside, 5,000 jobs take their time."""
expect.set_options(timeout=PATIENCE_MS)

Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One a module, and not one for all: Playwright holds an event loop for as long as it runs, and tests of other
    modules want their own."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    if not (AXE.exists() and load_console_files().has_charts):
        pytest.skip("no node_modules: run `npm ci` in api/console")
    # A sandbox of its own needs rights that containers do not give; without one, Chromium refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens a page at an address. Whatever the browser complains of fails the test, but complaints that contain one of
    the words that the test says it `expects`."""
    contexts, complaints = [], []

    def open_page(address: str, *, scheme: str = "light", width: int = 1280, expects: tuple[str, ...] = ()) -> Page:
        context = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light",
            viewport={"width": width, "height": 900},
            permissions=["clipboard-read", "clipboard-write"],
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()

        def complain(text: str) -> None:
            if not any(word in text for word in expects):
                complaints.append(text)

        page.on("pageerror", lambda error: complain(str(error)))
        page.on(
            "console",
            lambda told: complain(f"{told.text} {told.location}") if told.type in ("error", "warning") else None,
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def picture() -> Callable[[Page, str], None]:
    """Keeps what a page looks like."""

    def take(page: Page, name: str) -> None:
        PICTURES.mkdir(exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    return take


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ConsoleSite]:
    """A service on which nothing is yet."""
    made = small_site(tmp_path, hours=0.1)
    yield made
    made.close()


@pytest.fixture
def fleet(site: ConsoleSite) -> ConsoleSite:
    """Pools, nodes, queues, and jobs that run; their ids are `site.jobs` by name."""
    site.jobs = furnish(site)
    site.demand("inference", 70.0)
    for _ in range(4):
        site.solve_wanted(site.tick(after_s=5.0))
    return site


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleSite]:
    made = large_site(tmp_path_factory.mktemp("large"))
    yield made
    made.close()
