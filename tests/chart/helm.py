"""Helm as a library (helm-sdkpy), run in a child process because its Go runtime takes over signal handling.

`python -m tests.chart.helm` reads one call as JSON from standard input and prints {"answer": ...} or {"error": text}.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHART = Path(__file__).parents[2] / "helm" / "ebbtide"
WARNING = 2
"""Lint severity of warnings; errors are above it."""
LIMIT_S = 240.0

is_installed = importlib.util.find_spec("helm_sdkpy") is not None and importlib.util.find_spec("cffi") is not None
needed = pytest.mark.skipif(not is_installed, reason="no helm-sdkpy: `make helm` installs it")


class HelmError(Exception):
    """Helm returned an error, with its message."""


def lint(*charts: Path) -> list[list[str]]:
    """Return the files with warnings or errors, per chart."""
    results = _run_in_child({"verb": "lint", "charts": [str(chart) for chart in charts]})
    return [[each["Path"] for each in one["Messages"] or () if each["Severity"] >= WARNING] for one in results]


def install(
    kubeconfig: Path, release: str, namespace: str, values: dict[str, Any], *, takes_over: bool = False
) -> None:
    """Install the chart and wait for hooks, but not for pods. `takes_over` adopts existing objects."""
    _run_in_child(_call("install", kubeconfig, release, namespace, values=values, takes_over=takes_over))


def upgrade(kubeconfig: Path, release: str, namespace: str, values: dict[str, Any]) -> None:
    _run_in_child(_call("upgrade", kubeconfig, release, namespace, values=values, takes_over=False))


def uninstall(kubeconfig: Path, release: str, namespace: str) -> None:
    _run_in_child(_call("uninstall", kubeconfig, release, namespace))


def _call(verb: str, kubeconfig: Path, release: str, namespace: str, **more: Any) -> dict[str, Any]:
    return {"verb": verb, "kubeconfig": str(kubeconfig), "release": release, "namespace": namespace, **more}


def _run_in_child(call: dict[str, Any]) -> Any:
    command = [sys.executable, "-m", "tests.chart.helm"]
    done = subprocess.run(command, input=json.dumps(call), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout.splitlines()[-1])
    if "error" in reply:
        raise HelmError(reply["error"])
    return reply["answer"]


async def _execute(call: dict[str, Any]) -> Any:
    import helm_sdkpy

    config = helm_sdkpy.Configuration(call.get("namespace", "default"), call.get("kubeconfig"))
    match call["verb"]:
        case "lint":
            return [await helm_sdkpy.Lint(config).run(chart) for chart in call["charts"]]
        case "install" | "upgrade" as verb:
            action = (helm_sdkpy.Install if verb == "install" else helm_sdkpy.Upgrade)(config)
            options = {"wait": False, "timeout": 60, "server_side_apply": True, "take_ownership": call["takes_over"]}
            return await action.run(call["release"], str(CHART), call["values"], **options)
        case "uninstall":
            return await helm_sdkpy.Uninstall(config).run(call["release"], wait=False)


def main() -> None:
    try:
        reply = {"answer": asyncio.run(_execute(json.load(sys.stdin)))}
    except Exception as refused:  # whatever it is, the test that asked is results
        reply = {"error": f"{type(refused).__name__}: {refused}"}
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
