"""The documentation site builds in strict mode: no missing page, no broken link, no missing anchor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools.reference_pages import build_pages

ROOT = Path(__file__).resolve().parents[2]
README_LINES_MAX = 150


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("reference"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs" / "reference").mkdir()
    for name, text in build_pages().items():
        (tmp_path / "docs" / "reference" / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "build" / "site" / "reference" / "rest" / "index.html").is_file()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


def test_the_readme_is_short_and_its_links_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES_MAX
    targets = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert [target for target in targets if not (ROOT / target).exists()] == []
