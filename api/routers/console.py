"""The web console: one page and its files. They are open to everybody; for what they show the API asks a token."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, Request, Response

from api.console_files import ConsoleFiles
from api.errors import not_found

router = APIRouter(include_in_schema=False)

_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"

console_files = cache(ConsoleFiles)


@router.get("/")
async def console_page(request: Request) -> Response:  # async: what is in memory need not wait for a thread
    """The page names its files by version, so that it alone is asked for again."""
    files = console_files()
    return _answer(request, files.page, "text/html; charset=utf-8", f'"{files.version}"', _ASK_AGAIN)


@router.get("/console/{version}/{path:path}")
async def console_file(version: str, path: str, request: Request) -> Response:
    """A file of the console. One that is asked for by another release's page is told as it is now, and not kept."""
    files = console_files()
    found = files.file(path) or not_found("file of the console", path)
    keep = _FOR_EVER if version == files.version else _ASK_AGAIN
    return _answer(request, found.body, found.media_type, f'"{files.version}"', keep)


def _answer(request: Request, body: bytes, media_type: str, tag: str, keep: str) -> Response:
    headers = {**_HEADERS, "ETag": tag, "Cache-Control": keep}
    if tag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
