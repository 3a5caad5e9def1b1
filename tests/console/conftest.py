"""Fixtures with a real Chromium. A test fails if the browser reports an error that it does not expect."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.web_console import load_console_files
from tests.console.console_site import ConsoleSite
from tests.console.fleets import create_fleet, large_site, small_site

# The headless shell, a package of its own in Debian, needs half the CPU time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
AXE = Path(__file__).resolve().parents[2] / "api" / "console" / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = Path(__file__).parent / "screenshots"
TIMEOUT_MS = 60_000
"""Timeout of page assertions. Generous, because 5,000 jobs render slowly while other tests run."""
expect.set_options(timeout=TIMEOUT_MS)

Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser per module: Playwright runs an event loop while it is open, which tests of other modules need."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    if not (AXE.exists() and load_console_files().has_charts):
        pytest.skip("no node_modules: run `npm ci` in api/console")
    # Chromium refuses to run as root with its sandbox, which containers do not permit anyway.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Open a page at a URL. Any browser error fails the test unless it contains one of the `expects` strings."""
    contexts, complaints = [], []

    def open_page(address: str, *, scheme: str = "light", width: int = 1280, expects: tuple[str, ...] = ()) -> Page:
        context = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light",
            viewport={"width": width, "height": 900},
            permissions=["clipboard-read", "clipboard-write"],
        )
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()

        def complain(text: str) -> None:
            if not any(word in text for word in expects):
                complaints.append(text)

        page.on("pageerror", lambda error: complain(str(error)))
        page.on(
            "console",
            lambda message: (
                complain(f"{message.text} {message.location}") if message.type in ("error", "warning") else None
            ),
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            # A handler that still waits for its answer when the test ends would fail on the closed page.
            page.unroute_all(behavior="ignoreErrors")
        context.close()
    assert complaints == []


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Save a screenshot of a page, in the long variant of the tests."""

    def take(page: Page, name: str) -> None:
        if not request.config.getoption("--full"):
            return
        PICTURES.mkdir(exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    return take


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ConsoleSite]:
    """An empty service."""
    made = small_site(tmp_path, hours=0.1)
    yield made
    made.close()


@pytest.fixture
def fleet(site: ConsoleSite) -> ConsoleSite:
    """A service with pools, nodes, queues and running jobs. `site.jobs` maps job names to IDs."""
    site.jobs = create_fleet(site)
    site.demand("inference", 70.0)
    for _ in range(4):
        site.solve_requested_points(site.tick(after_s=5.0))
    return site


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleSite]:
    made = large_site(tmp_path_factory.mktemp("large"))
    yield made
    made.close()
