"""Modules of the console joined into the script of report files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import api.console_assets as assets
from api.console_assets import MissingChartLibraryError, join_modules, load_report_assets, render_data_block

needs_charts = pytest.mark.skipif(
    not all(path.is_file() for path in assets.CHART_FILES.values()), reason="no node_modules: run `npm ci`"
)


def write_modules(folder: Path, **sources: str) -> Path:
    for name, source in sources.items():
        (folder / f"{name}.js").write_text(source, encoding="utf-8")
    return folder


def test_joined_modules_run_once_each_and_keep_their_names_apart(tmp_path: Path) -> None:
    node = shutil.which("node") or pytest.skip("no Node.js")
    shared = 'const size = 2;\nexport const log = [];\nexport class Box {\n  size = size;\n}\nlog.push("shared");\n'
    left = (
        'import { Box, log } from "./shared.js";\n\nconst size = 3;\n'
        "export function left() {\n  log.push(new Box().size * size);\n}\n"
    )
    entry = (
        'import { left as begin } from "./left.js";\nimport {\n  Box,\n  log,\n} from "./shared.js";\n\n'
        "/** Not `import(x)`. */\nexport async function end() {}\nbegin();\nend();\n"
        "console.log(JSON.stringify([...log, new Box().size]));\n"
    )
    script = join_modules(write_modules(tmp_path, shared=shared, left=left, entry=entry), "entry.js")
    ended = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(ended.stdout) == ["shared", 6, 2]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('import * as all from "./other.js";\n', "import * as all"),
        ("export default 1;\n", "export default"),
        ("export let count = 0;\n", "export let"),
        ('const module = await import("./other.js");\n', "import("),
        ('const tag = "</SCRIPT>";\n', "</SCRIPT>"),
        ('import { entry } from "./entry.js";\n', "entry.js -> entry.js"),
    ],
)
def test_unsupported_modules_are_rejected(tmp_path: Path, source: str, found: str) -> None:
    with pytest.raises(ValueError, match=re.escape(found)):
        join_modules(write_modules(tmp_path, entry=source), "entry.js")


@pytest.mark.parametrize(
    "text", ["</script><script>", "<!-- a", "a & b", "\u2028 \u2029", 'a "quoted" \\ text', "日本"]
)
def test_data_never_ends_the_script_element(text: str) -> None:
    block = render_data_block({text: [text]})
    assert json.loads(block) == {text: [text]}
    assert not set("<>&\u2028\u2029") & set(block)


@needs_charts
def test_policy_permits_only_the_script_and_the_style() -> None:
    found = load_report_assets()
    sources = dict(part.split(" ", 1) for part in found.content_security_policy.split("; "))
    assert sources["default-src"] == "'none'"
    assert len(set(sources.values())) == 3  # `none`, and a hash of the script and one of the style
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", sources[name]) for name in ("script-src", "style-src"))
    assert "Leon Sorokin" in found.script  # the license of the chart library goes with every copy


def test_missing_chart_library_is_an_error_that_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assets, "CHART_FILES", {"charts.js": tmp_path / "none.js"})
    load_report_assets.cache_clear()
    with pytest.raises(MissingChartLibraryError, match="npm ci"):
        load_report_assets()
