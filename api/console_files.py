"""ConsoleFiles: the console's static files as they lie in the package, under an address that changes when one does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from scheduler.solver.profiles.shipped import gpu_names, model_names
from scheduler.telemetry.fleet_gauges import package_version

_FOLDER = Path(__file__).parent / "console"
_CHARTS = _FOLDER / "node_modules" / "uplot" / "dist"
_CHART_FILES = {"charts.js": _CHARTS / "uPlot.iife.min.js", "charts.css": _CHARTS / "uPlot.min.css"}
_CHART_TAGS = (
    '<link rel="stylesheet" href="/console/VERSION/charts.css">\n'
    '<script src="/console/VERSION/charts.js" defer></script>'
)
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    body: bytes
    media_type: str


class ConsoleFiles:
    """All files by their path below /console/`version`/, and the `page` that loads them. They are read once.

    The plotting library is what the package manager left beside them; where it was not run, `has_charts` is False, the
    page does not ask for it, and says in place of charts what is missing.
    """

    def __init__(self) -> None:
        static = _FOLDER / "static"
        found = {path.relative_to(static).as_posix(): path for path in static.rglob("*.*")}
        self.has_charts = all(path.is_file() for path in _CHART_FILES.values())
        found |= _CHART_FILES if self.has_charts else {}
        bodies = {name: path.read_bytes() for name, path in sorted(found.items())}
        bodies["names.json"] = json.dumps({"models": model_names(), "gpus": gpu_names()}).encode()
        bodies["version.json"] = json.dumps({"version": package_version()}).encode()
        told = b"".join(name.encode() + b"\0" + hashlib.sha256(body).digest() for name, body in bodies.items())
        self.version = hashlib.sha256(told).hexdigest()[:16]
        page = bodies.pop("index.html").decode().replace("<!-- charts -->", _CHART_TAGS if self.has_charts else "")
        self.page = page.replace("VERSION", self.version).encode()
        self._files = {name: ConsoleFile(body, _MEDIA_TYPES[Path(name).suffix]) for name, body in bodies.items()}

    def file(self, path: str) -> ConsoleFile | None:
        return self._files.get(path)
