"""Methods that work on both clients: each is written once, as a function that returns a description of its request.

The class of the client decides how the description is performed, and what the method returns:

| Decorator | Function returns | `Client` returns | `AsyncClient` returns |
|---|---|---|---|
| `RequestMethod` | `Request[T]` | `T` | awaitable `T` |
| `ListMethod` | `Pages[T]` | `list[T]` | awaitable `list[T]` |
| `IteratorMethod` | `Pages[T]` or `Stream[T]` | `Iterator[T]` | `AsyncIterator[T]` |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from ebbtide.client.requests import Pages, Request, Stream

if TYPE_CHECKING:
    from ebbtide.client.async_connection import AsyncConnection
    from ebbtide.client.connection import Connection

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class SyncCaller:
    """Base of the client whose methods return results."""

    _connection: Connection


class AsyncCaller:
    """Base of the client whose methods return awaitables and asynchronous iterators."""

    _connection: AsyncConnection


class RequestMethod(Generic[Parameters, Result]):
    """A method that sends one request and returns what its description reads from the answer."""

    def __init__(self, describe: Callable[Concatenate[Any, Parameters], Request[Result]]) -> None:
        self.describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> RequestMethod[Parameters, Result]: ...
    @overload
    def __get__(self, client: SyncCaller, owner: type) -> Callable[Parameters, Result]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[Parameters, Coroutine[Any, Any, Result]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self if client is None else _bind(self.describe, client, client._connection.send)


class ListMethod(Generic[Parameters, Result]):
    """A method that returns all items of a list."""

    def __init__(self, describe: Callable[Concatenate[Any, Parameters], Pages[Result]]) -> None:
        self.describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> ListMethod[Parameters, Result]: ...
    @overload
    def __get__(self, client: SyncCaller, owner: type) -> Callable[Parameters, list[Result]]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[Parameters, Coroutine[Any, Any, list[Result]]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self if client is None else _bind(self.describe, client, client._connection.collect)


class IteratorMethod(Generic[Parameters, Result]):
    """A method that yields the items of a list, or those of a stream as they arrive."""

    def __init__(self, describe: Callable[Concatenate[Any, Parameters], Pages[Result] | Stream[Result]]) -> None:
        self.describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> IteratorMethod[Parameters, Result]: ...
    @overload
    def __get__(self, client: SyncCaller, owner: type) -> Callable[Parameters, Iterator[Result]]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[Parameters, AsyncIterator[Result]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self if client is None else _bind(self.describe, client, client._connection.iterate)


def _bind(describe: Callable[..., Any], client: object, perform: Callable[[Any], Any]) -> Callable[..., Any]:
    @wraps(describe)
    def call(*arguments: Any, **options: Any) -> Any:
        return perform(describe(client, *arguments, **options))

    return call
