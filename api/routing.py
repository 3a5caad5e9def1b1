"""Routers: an endpoint does everything that waits in one thread: the look at the state, the change, and the answer.

FastAPI goes to a thread for each of these by itself, and checks every answer against its type once more: both together
took longer than the work. Answers are made by typed functions; tests hold each one against the OpenAPI document.

It would also analyse a route again for each application that includes its router. So operations get their ids where
they are written, and applications take the routes as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Later(Generic[V]):
    """What a dependency gives for something that has to be waited for: the endpoint's thread reads it first."""

    read: Callable[[], V]


class Router(APIRouter):
    """Endpoints that are plain functions are called as said above; coroutines are left alone."""

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not iscoroutinefunction(endpoint):
            endpoint = _in_one_thread(endpoint, options.get("status_code") or 200)
        super().add_api_route(path, endpoint, **options)


def noun_router(tag: str, prefix: str = "/v1") -> Router:
    """A router whose operations are called what their functions are."""
    return Router(prefix=prefix, tags=[tag], generate_unique_id_function=_name)


def _name(route: APIRoute) -> str:
    return route.name


def _in_one_thread(endpoint: Callable[..., Any], status: int) -> Callable[..., Any]:
    @wraps(endpoint)
    def answered(**given: Any) -> Any:
        told = endpoint(**{name: value.read() if isinstance(value, Later) else value for name, value in given.items()})
        if told is None or isinstance(told, Response):
            return told
        set_up = given.get("response")  # where an endpoint sets headers, or another status
        if not isinstance(set_up, Response):
            return JSONResponse(told, status)
        answer = JSONResponse(told, set_up.status_code or status)
        answer.headers.update(set_up.headers)
        return answer

    return answered
