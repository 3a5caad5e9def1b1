"""The page at the root: what the service offers, until there is a console."""

from __future__ import annotations

from html import escape
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Ebbtide</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; margin: 3em auto; max-width: 60em; padding: 0 1em }}
td {{ padding: 0 1.5em 0 0; vertical-align: top }} code {{ white-space: nowrap }}</style></head>
<body><h1>Ebbtide {version}</h1>
<p>Elastic GPU cluster scheduler. The machine-readable description is at
<a href="/openapi.json">/openapi.json</a>; the command line is <code>ebbtide --help</code>.</p>
<table>
{rows}
</table></body></html>
"""


def landing_page(openapi: dict[str, Any]) -> str:
    """HTML that lists the endpoints of an OpenAPI document."""
    rows = [
        f"<tr><td><code>{method.upper()} {escape(path)}</code></td>"
        f"<td>{escape(str(operation.get('description', '')).partition(chr(10))[0])}</td></tr>"
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    ]
    return _PAGE.format(version=escape(str(openapi["info"]["version"])), rows="\n".join(rows))
