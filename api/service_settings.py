"""The settings of the service, for admins. No response contains a secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ServiceDep, create_router
from api.http.paging import PageOf
from api.identity.authorization import ADMIN, requires
from scheduler.settings import Settings

_PREFIX = Settings.model_config["env_prefix"]
_MASK = "***"


class SettingView(TypedDict):
    """A setting of the process that responds."""

    name: Annotated[str, Field(description="Unique name in snake_case.")]
    variable: Annotated[str, Field(description="Environment variable that sets it.")]
    description: Annotated[str, Field(description="Meaning, unit and accepted values.")]
    source: Annotated[
        Literal["environment", "default"],
        Field(description="Whether the environment, or the command that started the service, sets it."),
    ]
    value: Annotated[
        Any,
        Field(description="Present value. Null: not set, or a secret. `***` stands for credentials within a URL."),
    ]
    default: Annotated[Any, Field(description="Value without the variable. Null: none.")]
    secret: Annotated[bool, Field(description="Whether the value is a secret, which no response contains.")]


router = create_router("identity")


@router.get("/settings")
@requires(ADMIN)
def list_settings(service: ServiceDep) -> PageOf[SettingView]:
    """List all settings of the service by name, with their sources. Values of secrets are left out."""
    return {"items": [_setting_view(name, service.settings) for name in sorted(Settings.model_fields)], "next": None}


def _setting_view(name: str, settings: Settings) -> SettingView:
    info = Settings.model_fields[name]
    is_secret = info.repr is False
    return {
        "name": name,
        "variable": f"{_PREFIX}{name.upper()}",
        "description": info.description or "",
        "source": "environment" if name in settings.model_fields_set else "default",
        "value": None if is_secret else _to_json(getattr(settings, name)),
        "default": None if is_secret else _to_json(info.default),
        "secret": is_secret,
    }


def _to_json(value: Any) -> Any:
    if isinstance(value, Path | str):
        return mask_credentials(str(value))
    return value


def mask_credentials(text: str) -> str:
    """Return the text with the user and password, and the query, of a URL masked: each may be a credential."""
    if "://" not in text:
        return text
    return re.sub(r"\?.*", f"?{_MASK}", re.sub(r"://.*@", f"://{_MASK}@", text))
