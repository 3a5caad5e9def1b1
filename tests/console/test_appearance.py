"""Golden screenshots of a few pages, compared with a tolerance. EBBTIDE_GOLDEN=write rewrites them.

Screenshots are compared at a quarter of their size, so that smoothing of letters and random parts of job IDs do not
count, while a lost chart, a wrong colour or a moved column does.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from scheduler.domain.fleet import Node
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import GPU, GPU_BYTES
from tests.console.console_site import ConsoleSite
from tests.console.fleets import create_fleet

if TYPE_CHECKING:
    from playwright.sync_api import Page

GOLDEN = Path(__file__).parent / "golden"
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
HEIGHT_PX = 900
SCALE = 4
"""Pixels of a screenshot per compared pixel, in both directions."""
DIFFERENCE_MIN = 32
"""Smallest difference of a colour channel, of 255, with which a compared pixel counts as changed."""
CHANGED_SHARE_MAX = 0.02


@dataclass(frozen=True, slots=True)
class View:
    """A page at a width in CSS pixels. `settled` is text that appears once the page is complete."""

    name: str
    path: str
    settled: str
    width: int = 1440
    scheme: str = "light"


VIEWS = (
    View("overview", "#/", "Recent events"),
    View("overview-dark", "#/", "Recent events", scheme="dark"),
    View("overview-narrow", "#/", "Recent events", width=390),
    View("jobs", "#/jobs", "llama-pretrain"),
)


@pytest.fixture(scope="module")
def noon_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleSite]:
    """A fleet whose clock stands at the same time in every run."""
    folder = tmp_path_factory.mktemp("noon")
    url = f"sqlite:///{folder / 'console.sqlite'}"
    migrate(url)
    names = [*((f"t{at}", "training") for at in range(6)), *((f"i{at}", "inference") for at in range(10))]
    nodes = [Node(name, pool, GPU, 8, GPU_BYTES) for name, pool in names]
    site = ConsoleSite(SqlStore(url), nodes, now_s=NOON.timestamp() - 1800, folder=folder / "run")
    site.tick()
    create_fleet(site)
    for demand in (70.0, 40.0, 20.0, 30.0):
        site.demand("inference", demand)
        for _ in range(5):
            site.solve_requested_points(site.tick(after_s=85.0))
    yield site
    site.close()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_page_looks_as_before(view: View, noon_site: ConsoleSite, browser: Browser) -> None:
    context = browser.new_context(
        color_scheme="dark" if view.scheme == "dark" else "light",
        viewport={"width": view.width, "height": HEIGHT_PX},
        timezone_id="UTC",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.clock.set_fixed_time(datetime.fromtimestamp(noon_site.clock.now_s(), UTC))
    page.goto(f"{noon_site.url}/{view.path}")
    expect(page.get_by_text(view.settled).first).to_be_visible()
    expect(page.locator("#connection")).to_have_text("Live")
    taken = _take(page)
    context.close()
    file = GOLDEN / f"{view.name}.png"
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        taken.save(file, optimize=True)
    changed = _compute_changed_share(taken, Image.open(file))
    assert changed <= CHANGED_SHARE_MAX, f"{changed:.1%} of {file.name} changed: look at it, and rewrite it if intended"


def _take(page: Page) -> Image.Image:
    """Return the visible part of a page at a quarter of its size."""
    shot = Image.open(io.BytesIO(page.screenshot(animations="disabled")))
    return shot.convert("RGB").resize((shot.width // SCALE, shot.height // SCALE), Image.Resampling.BOX)


def _compute_changed_share(taken: Image.Image, golden: Image.Image) -> float:
    """Return the share of pixels that differ; 1 if the sizes do."""
    if taken.size != golden.size:
        return 1.0
    difference = np.abs(np.asarray(taken, dtype=np.int16) - np.asarray(golden.convert("RGB"), dtype=np.int16))
    return float((difference.max(axis=-1) >= DIFFERENCE_MIN).mean())
