"""Helm as a library (helm-sdkpy), asked in a process of its own: its Go runtime takes over signals.

`python -m tests.chart.helm` reads one call as JSON from standard input and writes {"answer": ...} or {"error": text}.
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
"""The severity of what is worth looking at; what makes a chart unusable is above it."""
LIMIT_S = 240.0

is_there = importlib.util.find_spec("helm_sdkpy") is not None and importlib.util.find_spec("cffi") is not None
needed = pytest.mark.skipif(not is_there, reason="no helm-sdkpy: `make helm` installs it")


class HelmError(Exception):
    """Helm refused; the text is its own."""


def lint(*charts: Path) -> list[list[str]]:
    """Of each chart, the files that there is something to say of."""
    told = _ask({"verb": "lint", "charts": [str(chart) for chart in charts]})
    return [[each["Path"] for each in one["Messages"] or () if each["Severity"] >= WARNING] for one in told]


def install(
    kubeconfig: Path, release: str, namespace: str, values: dict[str, Any], *, takes_over: bool = False
) -> None:
    """Without waiting for pods, but for hooks. `takes_over` objects that somebody else made."""
    _ask(_call("install", kubeconfig, release, namespace, values=values, takes_over=takes_over))


def upgrade(kubeconfig: Path, release: str, namespace: str, values: dict[str, Any]) -> None:
    _ask(_call("upgrade", kubeconfig, release, namespace, values=values, takes_over=False))


def uninstall(kubeconfig: Path, release: str, namespace: str) -> None:
    _ask(_call("uninstall", kubeconfig, release, namespace))


def _call(verb: str, kubeconfig: Path, release: str, namespace: str, **more: Any) -> dict[str, Any]:
    return {"verb": verb, "kubeconfig": str(kubeconfig), "release": release, "namespace": namespace, **more}


def _ask(call: dict[str, Any]) -> Any:
    command = [sys.executable, "-m", "tests.chart.helm"]
    done = subprocess.run(command, input=json.dumps(call), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    if "error" in said:
        raise HelmError(said["error"])
    return said["answer"]


async def _take(call: dict[str, Any]) -> Any:
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
        said = {"answer": asyncio.run(_take(json.load(sys.stdin)))}
    except Exception as refused:  # whatever it is, the test that asked is told
        said = {"error": f"{type(refused).__name__}: {refused}"}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
