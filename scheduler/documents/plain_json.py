"""Conversion of any document to plain JSON types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any


def to_plain_json(document: Any) -> Any:
    """Return the document in plain JSON types. Infinite numbers and not-a-number become null."""
    if isinstance(document, Enum):
        return document.value
    if isinstance(document, float):
        return document if math.isfinite(document) else None
    if isinstance(document, Mapping):
        return {str(key): to_plain_json(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [to_plain_json(item) for item in document]
    return document
