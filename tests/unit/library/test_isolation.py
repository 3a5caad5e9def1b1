"""The library alone: a bare interpreter without any other package runs a session."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

LIBRARY = Path(__file__).resolve().parents[3] / "library"
SCRIPT = """
    import json, os, sys
    from importlib.util import find_spec

    sys.path.append(os.environ["LIBRARY"])
    import ebbtide

    with ebbtide.Session.from_environment() as session:
        session.mark_resumed(0, ebbtide.LoadTraffic(read_bytes=9))
        for step in range(1, session.steps_total + 1):
            if session.poll_notice():
                break
            session.report(step=step, loss=1.5)
        with session.saving(step):
            pass
        session.succeed()
    print(json.dumps({
        "plan": session.plan,
        "found": [name for name in ("scheduler", "api", "cli", "baselines", "torch") if find_spec(name)],
        "foreign": sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names),
    }))
"""


def test_session_runs_without_any_other_package(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"stages": []}')
    variables = {
        "LIBRARY": str(LIBRARY),
        "EBBTIDE_RUN_DIR": str(tmp_path),
        "EBBTIDE_PLAN": str(tmp_path / "plan.json"),
        "EBBTIDE_STEPS": "3",
        "EBBTIDE_URL": "http://127.0.0.1:9",
    }
    # Neither the environment (-I) nor installed packages (-S) can help.
    command = [sys.executable, "-I", "-S", "-c", dedent(SCRIPT)]
    ran = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(ran.stdout) == {"plan": {"stages": []}, "found": [], "foreign": ["__main__", "ebbtide"]}
    status = json.loads((tmp_path / "status-0.json").read_text())
    assert (status["phase"], status["step"], status["checkpoint_step"]) == ("succeeded", 3, 3)
    assert status["traffic"] == {"needed_bytes": 0, "read_bytes": 9, "moved_bytes": 0}


def _imported_packages(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", sorted((LIBRARY / "ebbtide").glob("*.py")), ids=lambda path: path.stem)
def test_library_imports_nothing_but_the_standard_library_and_torch(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert set(_imported_packages(tree)) <= {"ebbtide", "torch", *sys.stdlib_module_names}
