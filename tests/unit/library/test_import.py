"""Imports of the user's package: cheap, lazy, typed, and possible on the oldest interpreter that is supported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import ebbtide

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ROOT / "library"
IMPORT_S_MAX = 0.05


def run_script(script: str, *options: str) -> dict[str, object]:
    """Run a script that can import the library, and return the JSON object that it prints."""
    started = f"import json, sys, time; sys.path.insert(0, {str(LIBRARY)!r})\n{dedent(script)}"
    ran = subprocess.run([sys.executable, *options, "-c", started], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def test_import_takes_less_than_50_ms() -> None:
    """Of processor time, so that the load of the machine does not matter. Nothing is waited for."""
    script = """
        started_at_s = time.process_time()
        import ebbtide
        taken_s = time.process_time() - started_at_s
        own = sorted(name for name in sys.modules if name.split(".")[0] == "ebbtide")
        print(json.dumps({"s": taken_s, "own": own}))
    """
    runs = [run_script(script) for _ in range(3)]
    assert all(run["own"] == ["ebbtide"] for run in runs)
    assert min(float(str(run["s"])) for run in runs) < IMPORT_S_MAX


def test_session_and_notices_load_no_http_library() -> None:
    script = """
        import ebbtide
        names = [ebbtide.Session, ebbtide.Notice, ebbtide.NoticeAction, ebbtide.LoadTraffic]
        print(json.dumps({"loaded": [name for name in ("httpx", "tenacity", "torch", "numpy") if name in sys.modules]}))
    """
    assert run_script(script) == {"loaded": []}


def test_every_public_name_is_importable_and_listed() -> None:
    assert set(ebbtide.__all__) <= set(dir(ebbtide))
    for name in ebbtide.__all__:
        assert getattr(ebbtide, name).__name__ == name
    assert ebbtide.client.Client is ebbtide.Client
    assert not hasattr(ebbtide, "Nothing")


def test_package_passes_the_type_checker_for_the_oldest_interpreter(tmp_path: Path) -> None:
    """Names that are newer than Python 3.10 fail here. The script is checked as its user's type checker sees it."""
    script = tmp_path / "script.py"
    script.write_text(
        dedent("""
            import ebbtide

            with ebbtide.Session.from_environment() as session:
                reveal_type(session.steps_total)
            reveal_type(ebbtide.Client("http://localhost").job("a")["name"])

            async def call(client: ebbtide.AsyncClient) -> None:
                reveal_type((await client.job("a"))["name"])
                reveal_type([pool["name"] for pool in await client.pools()])
                async for line in client.follow_logs("a", tail=3):
                    reveal_type(line["text"])
                await client.job("a", "b")
        """)
    )
    oldest = re.findall(r'requires-python = ">=([\d.]+)"', (LIBRARY / "pyproject.toml").read_text())
    assert oldest == ["3.10"]
    options = ["--python-version", *oldest, "--config-file", "", "--no-incremental"]
    skipped = ["--ignore-missing-imports", "--follow-imports", "skip"]  # other packages: not the subject, and slow
    command = [sys.executable, "-P", "-m", "mypy", *options, *skipped, str(LIBRARY / "ebbtide"), str(script)]
    ran = subprocess.run(command, cwd=LIBRARY, capture_output=True, text=True, check=False)
    revealed = re.findall(r'Revealed type is "(.*)"', ran.stdout)
    assert re.findall(r"(\S+):(\d+): error: .*\[(.*)\]", ran.stdout) == [(str(script), "13", "call-arg")], ran.stdout
    assert revealed == ["int", "str", "str", "list[str]", "str"]
