"""CSV tables as responses."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Response

CSV = "text/csv"
CSV_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {CSV: {"schema": {"type": "string"}}}}}
"""The form of the successful response of a route that also returns CSV."""
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def wants_csv(form: str, accept: str) -> bool:
    """Return whether the query parameter `format` or the header `Accept` requests CSV."""
    return form == "csv" or (not form and accept.partition(";")[0].strip().lower() == CSV)


def format_csv(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def respond_with_csv(text: str, file_name: str) -> Response:
    """Return a response that browsers save under the file name."""
    headers = {"Content-Disposition": f'attachment; filename="{file_name}"'}
    return Response(text, media_type=CSV, headers=headers)


def format_iso_time(at_s: object) -> str:
    assert isinstance(at_s, int)
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def escape_formula(cell: str) -> str:
    """Prefix cells that a spreadsheet would run as a formula with a quote."""
    return f"'{cell}" if cell.startswith(_FORMULA_PREFIXES) else cell
