"""The web console and the API reference: their pages and static files.

They are public. The API that they call requires authentication.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from api.console_assets import CHART_FILES, CONSOLE_FOLDER, STATIC_FOLDER
from api.http.errors import raise_not_found
from api.identity.authorization import PUBLIC, requires
from scheduler.package_version import get_package_version
from scheduler.solver.profiles.catalog import list_gpu_names, list_model_names

_SWAGGER_UI = CONSOLE_FOLDER / "node_modules" / "swagger-ui-dist"
_REFERENCE_FILES = {
    "swagger-ui.js": _SWAGGER_UI / "swagger-ui-bundle.js",
    "swagger-ui.css": _SWAGGER_UI / "swagger-ui.css",
}
_CHART_TAGS = (
    '<link rel="stylesheet" href="/console/VERSION/charts.css">\n'
    '<script src="/console/VERSION/charts.js" defer></script>'
)
_REFERENCE_TAGS = (
    '<link rel="stylesheet" href="/console/VERSION/swagger-ui.css">\n'
    '<script src="/console/VERSION/swagger-ui.js" defer></script>\n'
    '<script src="/console/VERSION/reference.js" defer></script>'
)
_DEMO_TAGS = (
    '<link rel="stylesheet" href="/console/VERSION/demo.css">\n'
    '<script src="/console/VERSION/demo.js" type="module"></script>'
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
    """All files by path below /console/`version`/, and the pages that load them. `version` changes with any file.

    The libraries of charts and of the reference come from npm. If they are not installed, `has_charts` or
    `has_reference` is False and the page shows a note instead. `demo_page` is the page with the controls of the demo.
    """

    def __init__(self) -> None:
        found = {path.relative_to(STATIC_FOLDER).as_posix(): path for path in STATIC_FOLDER.rglob("*.*")}
        self.has_charts = all(path.is_file() for path in CHART_FILES.values())
        found |= CHART_FILES if self.has_charts else {}
        self.has_reference = all(path.is_file() for path in _REFERENCE_FILES.values())
        found |= _REFERENCE_FILES if self.has_reference else {}
        bodies = {name: path.read_bytes() for name, path in sorted(found.items())}
        bodies["names.json"] = json.dumps({"models": list_model_names(), "gpus": list_gpu_names()}).encode()
        bodies["version.json"] = json.dumps({"version": get_package_version()}).encode()
        contents = b"".join(name.encode() + b"\0" + hashlib.sha256(body).digest() for name, body in bodies.items())
        self.version = hashlib.sha256(contents).hexdigest()[:16]
        page = bodies.pop("index.html").decode().replace("<!-- charts -->", _CHART_TAGS if self.has_charts else "")
        self.page, self.demo_page = (
            page.replace("<!-- demo -->", tags).replace("VERSION", self.version).encode() for tags in ("", _DEMO_TAGS)
        )
        tags = _REFERENCE_TAGS if self.has_reference else ""
        reference = bodies.pop("reference.html").decode().replace("<!-- reference -->", tags)
        self.reference = reference.replace("VERSION", self.version).encode()
        self._guide = bodies.pop("guide.html").decode().replace("VERSION", self.version)
        self._files = {name: ConsoleFile(body, _MEDIA_TYPES[Path(name).suffix]) for name, body in bodies.items()}

    def render_guide(self, title: str, contents: str, body: str) -> bytes:
        """Return a page of the documentation. `contents` and `body` are HTML."""
        page = self._guide.replace("TITLE", title).replace("CONTENTS", contents).replace("BODY", body)
        return page.encode()

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
REVALIDATE = "no-cache"

load_console_files = cache(ConsoleFiles)


@router.get("/")
@requires(PUBLIC)
async def console_page(request: Request) -> Response:  # async: serves from memory without a thread
    """The page. It names its files by version, so browsers revalidate only the page."""
    files, is_demo = load_console_files(), request.app.state.demo is not None
    page, version = (files.demo_page, f"{files.version}-demo") if is_demo else (files.page, files.version)
    return file_response(request, page, "text/html; charset=utf-8", f'"{version}"', REVALIDATE)


@router.get("/docs")
@requires(PUBLIC)
async def reference_page(request: Request) -> Response:
    """The API reference."""
    files = load_console_files()
    return file_response(request, files.reference, "text/html; charset=utf-8", f'"{files.version}"', REVALIDATE)


@router.get("/console/{version}/{path:path}")
@requires(PUBLIC)
async def console_file(version: str, path: str, request: Request) -> Response:
    """A file of the console. A page of another release gets the current file, which browsers do not cache."""
    files = load_console_files()
    found = files.file(path) or raise_not_found("file of the console", path)
    keep = _CACHE_FOREVER if version == files.version else REVALIDATE
    return file_response(request, found.body, found.media_type, f'"{files.version}"', keep)


def file_response(request: Request, body: bytes, media_type: str, etag: str, cache_control: str) -> Response:
    headers = {**_HEADERS, "ETag": etag, "Cache-Control": cache_control, "Vary": "Accept-Encoding"}
    if etag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return Response(_compress(body), media_type=media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(body, media_type=media_type, headers=headers)


@cache
def _compress(body: bytes) -> bytes:
    """Return a file of the console as gzip. Files are few and the same for every caller."""
    return gzip.compress(body, mtime=0)
