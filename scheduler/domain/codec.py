"""Lossless JSON round trip for the frozen dataclasses of the domain, driven by their type hints.

Enums become their value, tuples lists, mappings with string keys objects, other mappings lists of pairs,
members of a union objects with a `kind`. Infinite floats are written as strings, because JSON has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_AS_THEY_ARE = frozenset({NoneType, bool, int, str})


class CodecError(ValueError):
    """A document does not have the form of the type it should hold; the message names the field."""


def encode(value: object) -> Any:
    """The value as plain JSON types. A member of a union of dataclasses is encoded by `encode_as`."""
    return encode_as(type(value), value)


def encode_as(hint: Any, value: Any) -> Any:
    """As `encode`, for any type hint: a union such as `Decision`, for example."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return value.value
    hint = _without_none(hint)
    if is_dataclass(kind):
        document = {name: encode_as(inner, getattr(value, name)) for name, inner in _hints(kind).items()}
        return {"kind": kind.__name__, **document} if _members(hint) else document
    if isinstance(value, tuple):
        return [encode_as(_item_hint(hint, at), item) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        key_hint, item_hint = _arguments(hint)
        pairs = [(encode_as(key_hint, key), encode_as(item_hint, item)) for key, item in value.items()]
        return dict(pairs) if key_hint is str else [list(pair) for pair in pairs]
    if isinstance(value, int | str):
        return value
    raise TypeError(f"the codec has no form for {type(value).__name__}")


def decode(hint: type[T], document: Any) -> T:
    """The value of type `hint` that `encode` would write as `document`.

    Raises:
        CodecError: a field is missing, unknown, of another type, or refused by the type itself.
    """
    value: T = decode_as(hint, document)
    return value


def decode_as(hint: Any, document: Any) -> Any:
    """As `decode`, for any type hint: the inverse of `encode_as`."""
    return _decode(hint, document, "$")


def _decode(hint: Any, document: Any, path: str) -> Any:
    return _decoder(hint)(hint, document, path)


@cache
def _decoder(hint: Any) -> Callable[[Any, Any, str], Any]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _decode_union
    if is_dataclass(hint):
        return _decode_dataclass
    if origin is tuple:
        return _decode_tuple
    return _decode_mapping if isinstance(origin, type) and issubclass(origin, Mapping) else _decode_scalar


def _decode_union(hint: Any, document: Any, path: str) -> Any:
    if document is None and NoneType in get_args(hint):
        return None
    members = _members(hint)
    if not members:
        return _decode(_without_none(hint), document, path)
    _expect(document, dict, path)
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in members:
        raise CodecError(f"{path}.kind: {kind!r} is not one of {', '.join(sorted(members))}")
    return _decode_dataclass(members[kind], {k: v for k, v in document.items() if k != "kind"}, path)


def _decode_dataclass(hint: Any, document: Any, path: str) -> Any:
    _expect(document, dict, path)
    hints = _hints(hint)
    if unknown := sorted(set(document) - set(hints)):
        raise CodecError(f"{path}: unknown field {unknown[0]!r}; allowed: {', '.join(hints)}")
    if missing := [name for name in _required(hint) if name not in document]:
        raise CodecError(f"{path}: field {missing[0]!r} is missing")
    values = {name: _decode(hints[name], item, f"{path}.{name}") for name, item in document.items()}
    try:
        return hint(**values)
    except CodecError:
        raise
    except ValueError as refused:
        raise CodecError(f"{path}: {refused}") from None


def _decode_tuple(hint: Any, document: Any, path: str) -> tuple[Any, ...]:
    _expect(document, list, path)
    arguments = _arguments(hint)
    if Ellipsis not in arguments and len(document) != len(arguments):
        raise CodecError(f"{path}: expected {len(arguments)} items, got {len(document)}")
    return tuple(_decode(_item_hint(hint, at), item, f"{path}[{at}]") for at, item in enumerate(document))


def _decode_mapping(hint: Any, document: Any, path: str) -> Any:
    key_hint, item_hint = _arguments(hint)
    if key_hint is str:
        _expect(document, dict, path)
        return {key: _decode(item_hint, item, f"{path}.{key}") for key, item in document.items()}
    _expect(document, list, path)
    for pair in document:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CodecError(f"{path}: expected a list of pairs, got {pair!r}")
    pairs = [(_decode(key_hint, key, f"{path}.key"), item) for key, item in document]
    decoded = {key: _decode(item_hint, item, f"{path}[{key}]") for key, item in pairs}
    if len(decoded) < len(pairs):
        raise CodecError(f"{path}: a key stands twice")
    return decoded


def _decode_scalar(hint: Any, document: Any, path: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(document)
        except ValueError:
            allowed = ", ".join(str(member.value) for member in hint)
            raise CodecError(f"{path}: {document!r} is not one of {allowed}") from None
    if hint is float and isinstance(document, str) and document in ("inf", "-inf", "nan"):
        return float(document)
    if hint is float and isinstance(document, int) and not isinstance(document, bool):
        try:
            return float(document)
        except OverflowError:
            raise CodecError(f"{path}: the number is too large") from None
    if isinstance(document, bool) is not (hint is bool):
        raise CodecError(f"{path}: expected {hint.__name__}, got {document!r}")
    _expect(document, hint, path)
    return document


def _expect(document: Any, kind: type, path: str) -> None:
    if not isinstance(document, kind):
        raise CodecError(f"{path}: expected {kind.__name__}, got {document!r:.80}")


def _item_hint(hint: Any, at: int) -> Any:
    arguments = _arguments(hint)
    return arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else arguments[at]


@cache
def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        rest = tuple(member for member in get_args(hint) if member is not NoneType)
        return reduce(or_, rest)
    return hint


@cache
def _members(hint: Any) -> dict[str, Any]:
    """The dataclasses of a union of several, by name; empty for any other hint."""
    if get_origin(hint) not in (Union, UnionType):
        return {}
    members = [member for member in get_args(hint) if is_dataclass(member)]
    return {member.__name__: member for member in members if isinstance(member, type)} if len(members) > 1 else {}


@cache
def _arguments(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Type hints of the fields, without those that only hold what follows from the others."""
    derived = {f.name for f in fields(kind) if f.metadata.get("derived")}
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in derived}


@cache
def _required(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
