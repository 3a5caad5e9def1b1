"""Documents of hardware for the REST API: the body of a GPU profile, and its name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, RootModel

from scheduler.documents.document import require_form

PROFILE_BYTES_MAX = 256 * 1024
"""Maximum size of a profile as JSON text."""
_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9._]{0,61}[a-z0-9])?$"
GPU_NAME_FORM = "1 to 63 characters of a-z, 0-9, '-', '.' and '_', starting and ending with a letter or digit"
GpuName = Annotated[
    str, Field(json_schema_extra={"pattern": _NAME_PATTERN}), require_form(_NAME_PATTERN, GPU_NAME_FORM)
]


class GpuProfileDocument(RootModel[dict[str, Any]]):
    """A GPU profile as `ebbtide profile` writes it: `gpu`, `precision`, `dimensions`, and figures.

    A figure is a number in the unit of its field, or an object with `value`, `unit` and `source`.
    """
