"""ConsoleFiles: the console's static files as they lie in the package, under an address that changes when one does.

The web console: one page and its files. They are open to everybody; for what they show the API asks a token.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from api.http.errors import raise_not_found
from scheduler.solver.profiles.catalog import list_gpu_names, list_model_names
from scheduler.telemetry.fleet_gauges import get_package_version

_CONSOLE_FOLDER = Path(__file__).parent / "console"
_CHARTS = _CONSOLE_FOLDER / "node_modules" / "uplot" / "dist"
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
        static = _CONSOLE_FOLDER / "static"
        found = {path.relative_to(static).as_posix(): path for path in static.rglob("*.*")}
        self.has_charts = all(path.is_file() for path in _CHART_FILES.values())
        found |= _CHART_FILES if self.has_charts else {}
        bodies = {name: path.read_bytes() for name, path in sorted(found.items())}
        bodies["names.json"] = json.dumps({"models": list_model_names(), "gpus": list_gpu_names()}).encode()
        bodies["version.json"] = json.dumps({"version": get_package_version()}).encode()
        told = b"".join(name.encode() + b"\0" + hashlib.sha256(body).digest() for name, body in bodies.items())
        self.version = hashlib.sha256(told).hexdigest()[:16]
        page = bodies.pop("index.html").decode().replace("<!-- charts -->", _CHART_TAGS if self.has_charts else "")
        self.page = page.replace("VERSION", self.version).encode()
        self._files = {name: ConsoleFile(body, _MEDIA_TYPES[Path(name).suffix]) for name, body in bodies.items()}

    def file(self, path: str) -> ConsoleFile | None:
        return self._files.get(path)


router = APIRouter(include_in_schema=False)

_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_CACHE_FOREVER = "public, max-age=31536000, immutable"
_REVALIDATE = "no-cache"

load_console_files = cache(ConsoleFiles)


@router.get("/")
async def console_page(request: Request) -> Response:  # async: what is in memory need not wait for a thread
    """The page names its files by version, so that it alone is asked for again."""
    files = load_console_files()
    return _file_response(request, files.page, "text/html; charset=utf-8", f'"{files.version}"', _REVALIDATE)


@router.get("/console/{version}/{path:path}")
async def console_file(version: str, path: str, request: Request) -> Response:
    """A file of the console. One that is asked for by another release's page is told as it is now, and not kept."""
    files = load_console_files()
    found = files.file(path) or raise_not_found("file of the console", path)
    keep = _CACHE_FOREVER if version == files.version else _REVALIDATE
    return _file_response(request, found.body, found.media_type, f'"{files.version}"', keep)


def _file_response(request: Request, body: bytes, media_type: str, etag: str, cache_control: str) -> Response:
    headers = {**_HEADERS, "ETag": etag, "Cache-Control": cache_control}
    if etag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
