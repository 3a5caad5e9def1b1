"""Settings of the service, and the checks of them that `ebbtide serve` and `ebbtide doctor` share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.exit_codes import InputError, RefusedError, UnreachableError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from scheduler.settings import Settings

PREFIX = "EBBTIDE_"
_USERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A problem with the value of an environment variable."""

    variable: str
    message: str


class InvalidSettingsError(Exception):
    """Settings with invalid values. It has at least one problem."""

    def __init__(self, problems: tuple[SettingProblem, ...]) -> None:
        super().__init__("; ".join(f"{each.variable}: {each.message}" for each in problems))
        self.problems = problems


def load_settings() -> Settings:
    """Return the settings in the environment. Raises InvalidSettingsError with all problems."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from scheduler.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        raise InvalidSettingsError(tuple(_describe_invalid_values(error))) from error
    except SettingsError as error:
        raise InvalidSettingsError((_describe_malformed_json(error),)) from error


def read_settings() -> Settings:
    """Return the settings in the environment. Raises InputError that names the invalid variable."""
    try:
        return load_settings()
    except InvalidSettingsError as error:
        first = error.problems[0]
        raise InputError(f"{first.variable}: {first.message}") from error


def _describe_invalid_values(error: ValidationError) -> Iterator[SettingProblem]:
    for each in error.errors():
        name, *inside = (str(part) for part in each["loc"])
        where = f"{'.'.join(inside)}: " if inside else ""
        yield SettingProblem(PREFIX + name.upper(), f"{where}{each['input']!r} is invalid: {each['msg']}")


def _describe_malformed_json(error: SettingsError) -> SettingProblem:
    from scheduler.settings import Settings

    # pydantic-settings names the field in the text only.
    name = next(name for name in Settings.model_fields if f'"{name}"' in str(error))
    variable = PREFIX + name.upper()
    value, description = os.environ.get(variable, ""), Settings.model_fields[name].description
    return SettingProblem(variable, f"{value!r} is not JSON: {error.__cause__}. Accepted: {description}")


def find_auth_problem(settings: Settings) -> str:
    """Return why the service may not run without authentication on its address; empty if it may."""
    if settings.auth != "off" or settings.is_loopback:
        return ""
    return (
        f"EBBTIDE_AUTH is off, but EBBTIDE_HOST {settings.host} is not a loopback address. Set EBBTIDE_AUTH to on "
        "and create a token with `ebbtide token create`, or listen on a loopback address, or accept "
        "unauthenticated callers with off-everywhere."
    )


def check_auth(settings: Settings) -> None:
    """Raise InputError if the service may not run without authentication on its address."""
    if problem := find_auth_problem(settings):
        raise InputError(problem)


def find_other_users(settings: Settings) -> str:
    """Return the names of other login users who would have full access; empty if authentication is on."""
    from cli.login_users import list_other_login_users

    others = list_other_login_users() if settings.auth == "off" else []
    return ", ".join(others[:_USERS_SHOWN]) + (" and others" if len(others) > _USERS_SHOWN else "")


def check_other_users(settings: Settings) -> None:
    """Raise RefusedError if authentication is off on a machine with other login users."""
    if names := find_other_users(settings):
        raise RefusedError(
            f"authentication is off, but {names} can log in to this machine and would have full access. Leave "
            "out --no-auth and EBBTIDE_AUTH=off: your own commands need no login. To give all users access, add "
            "--force."
        )


@contextmanager
def database_errors(source: str = "EBBTIDE_DATABASE_URL") -> Iterator[None]:
    """Turn each error of the database in the block into a command error whose exit code tells the kind.

    Args:
        source: the setting or option that names the database.
    """
    from scheduler.store.database import StoreRefusedError
    from scheduler.store.protocol import UnavailableError

    try:
        yield
    except UnavailableError as error:
        raise UnreachableError(f"{source}: {error}") from error
    except StoreRefusedError as error:
        raise RefusedError(f"{source}: {error}") from error
    except ValueError as error:
        raise InputError(f"{source}: {error}") from error
