"""Report files in a browser: each opens from disk alone, and draws the console's charts."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Locator, Page, expect
from typer.testing import CliRunner

from cli.app import app
from cli.safety_report import render_report_html
from cli.simulation.report import render_page
from tests.builders_simulation import build_policy_series
from tests.console.test_accessibility import find_serious_violations

if TYPE_CHECKING:
    from tests.console.conftest import Opener

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
CLUSTER = """
pools:
  - {name: training, kind: training, nodes: 1, gpus_per_node: 4, gpu: a100-80g}
  - {name: inference, kind: inference, nodes: 1, gpus_per_node: 4, gpu: a100-80g, lending: {headroom: 0}}
"""
CHARTS = {"simulation": 5, "safety": 3, "curve": 1}
"""Number of charts in each report."""
SOME_PIXELS = """canvas => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
}"""


def make_day(number: int) -> dict[str, Any]:
    ratio = None if number % 3 else 0.2 * number
    return {
        "start_s": 86_400.0 * number,
        "lent_gpu_hours": 10.0 * number,
        "recalls": 1,
        "deadline_ratio_max": ratio,
        "short_intervals": number % 2,
    }


SAFETY: dict[str, Any] = {
    "pool": "inference",
    "month": "1970-01",
    "from_s": 0.0,
    "until_s": 864_000.0,
    "is_complete": False,
    "verdict": "broken",
    "summary": "Lending broke its promise.",
    "loans": 9,
    "lent_gpu_hours": 450.0,
    "recalls": 10,
    "outcomes": {"in_time": 9, "late": 1, "cancelled": 0, "lost": 0},
    "open_recalls": 0,
    "return_times": None,
    "intervals": 2880,
    "short_intervals": 5,
    "recomputed_intervals": 0,
    "target": 0.001,
    "lost_gpu_hours": 0.0,
    "lost_steps": 0.0,
    "longest": None,
    "days": [{"start_s": 86_400.0, "late": 1, "lost": 0, "short_intervals": 1, "lost_gpu_hours": 0.0}],
    "daily": [make_day(number) for number in range(10)],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports as the commands write them."""
    folder = tmp_path_factory.mktemp("reports")
    with chdir(folder):
        jobs = "".join(f"j{number},{number * 30},600,{1 + number % 2}\n" for number in range(8))
        Path("jobs.csv").write_text(f"job_id,submit_time_s,duration_s,gpus\n{jobs}")
        Path("cluster.yaml").write_text(CLUSTER)
        Path("demand.csv").write_text("time_s,pool,gpus\n0,inference,0\n")
        words = "--jobs jobs.csv --demand demand.csv --cluster cluster.yaml --forecast oracle --processes 1"
        run("simulate", *words.split(), "--policy", "fifo,ebbtide", "--report", "simulation")
        run("plan", "--model", "gpt2", "--global-batch", "8", "--gpus", "1:4", "--plot", "curve.html")
        Path("safety.html").write_text(render_report_html(SAFETY), encoding="utf-8")
    return {
        "simulation": folder / "simulation" / "report.html",
        "safety": folder / "safety.html",
        "curve": folder / "curve.html",
    }


def run(*words: str) -> None:
    ended = CliRunner().invoke(app, list(words), prog_name="ebbtide")
    assert ended.exit_code == 0, ended.output


def card(page: Page, title: str) -> Locator:
    return page.get_by_role("region", name=title, exact=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_reports_open_from_disk(reports: dict[str, Path], opened: Opener, scheme: str, width: int) -> None:
    page, loaded, faults = opened("about:blank", scheme=scheme, width=width), list[str](), {}
    page.on("request", lambda request: loaded.append(request.url))
    for name, file in reports.items():
        page.goto(file.as_uri())
        expect(page.locator("#charts .uplot canvas")).to_have_count(CHARTS[name])
        for canvas in page.locator("#charts canvas").all():
            assert canvas.evaluate(SOME_PIXELS) > 3, name
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        if found := find_serious_violations(page):
            faults[name] = found
    assert faults == {}
    assert loaded == [file.as_uri() for file in reports.values()]


def test_series_are_hidden_with_the_keyboard_and_stay_hidden_in_another_theme(
    reports: dict[str, Path], opened: Opener
) -> None:
    page = opened(reports["simulation"].as_uri())
    legend = card(page, "Pending jobs").get_by_role("group", name="Legend of Pending jobs")
    fifo = legend.get_by_role("button", name="fifo")
    expect(fifo).to_have_attribute("aria-pressed", "true")
    fifo.press("Enter")
    expect(fifo).to_have_attribute("aria-pressed", "false")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(fifo).to_have_attribute("aria-pressed", "false")
    assert find_serious_violations(page) == []
    fifo.click()
    expect(fifo).to_have_attribute("aria-pressed", "true")


def test_charts_over_time_zoom_together(reports: dict[str, Path], opened: Opener) -> None:
    page = opened(reports["simulation"].as_uri())
    plot = card(page, "Pending jobs").locator(".u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 80, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 40, steps=3)
    page.mouse.up()
    all_buttons = page.get_by_role("button", name="Show all")
    expect(card(page, "Useful work of training pools").get_by_role("button", name="Show all")).to_be_visible()
    all_buttons.first.click()
    expect(all_buttons).to_have_count(0)


def test_values_are_listed_below_each_chart(reports: dict[str, Path], opened: Opener) -> None:
    page = opened(reports["safety"].as_uri())
    lent = card(page, "GPU-hours lent")
    lent.get_by_text("Values as a table").click()
    rows = lent.get_by_role("region", name="GPU-hours lent").locator("tbody tr")
    expect(rows).to_have_count(10)
    expect(rows.first).to_contain_text("10 Jan")
    expect(rows.first).to_contain_text("90")


def test_reports_print_in_the_light_theme(reports: dict[str, Path], opened: Opener) -> None:
    page = opened(reports["curve"].as_uri(), scheme="dark")
    html = page.locator("html")
    page.emulate_media(media="print")
    expect(html).to_have_attribute("data-theme", "light")
    page.emulate_media(media="screen")
    expect(html).to_have_attribute("data-theme", "dark")


def test_texts_of_users_are_never_markup(reports: dict[str, Path], opened: Opener, tmp_path: Path) -> None:
    document = json.loads((reports["simulation"].parent / "report.json").read_text())
    for report in document["policies"]:
        report["policy"] = HOSTILE
    pages = {
        "simulation.html": render_page(document, HOSTILE, [build_policy_series(HOSTILE), build_policy_series("fifo")]),
        "safety.html": render_report_html({**SAFETY, "pool": HOSTILE, "summary": HOSTILE}),
    }
    page = opened("about:blank")
    for name, text in pages.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        page.goto((tmp_path / name).as_uri())
        expect(page.locator("#charts .uplot").first).to_be_visible()
        expect(page.get_by_text(HOSTILE).first).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img, script:not([type])").count() == 1
