"""Types of settings: numbers with limits, URLs, networks and certificate files."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints

from scheduler.network_addresses import parse_networks


def _check_http_url(text: str) -> str:
    if not text:
        return text
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or any(mark.isspace() for mark in text):
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT, optionally with a path, without a query")
    return text


def _check_networks(text: str) -> str:
    try:
        parse_networks(text)
    except ValueError as error:
        raise ValueError(f"{error}; accepted: 10.0.0.7, 10.0.0.0/8, 2001:db8::/32") from None
    return text


def _check_ca_file(file: Path) -> Path:
    try:
        ssl.create_default_context(cafile=str(file))
    except OSError as error:  # includes ssl.SSLError, which a file without certificates raises
        raise ValueError(f"must be a readable PEM file with at least one certificate: {error}") from None
    return file


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, allow_inf_nan=False)]
RetentionDays = Annotated[int, Field(ge=0, le=36_500)]
OptionalUrl = Annotated[str, AfterValidator(_check_http_url)]
Networks = Annotated[str, AfterValidator(_check_networks)]
CaFile = Annotated[Path, AfterValidator(_check_ca_file)]


GrantText = Annotated[str, StringConstraints(pattern=r"^(admin|(viewer|submitter|queue-admin)(:[^:\s]{1,63})?)$")]

Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
