"""Values to JSON: the half of the codec that writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from scheduler.domain.type_hints import hints_of, members_of, without_none

Encoder = Callable[[Any], Any]
_AS_THEY_ARE = frozenset({NoneType, bool, int, str})


@cache
def encoder_of(hint: Any) -> Encoder:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _union_encoder(hint)
    if is_dataclass(hint):
        return _dataclass_encoder(hint)
    if origin is tuple:
        return _tuple_encoder(get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_encoder(*get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("value")
    return _as_it_is if hint in _AS_THEY_ARE else _encode_number


def _as_it_is(value: Any) -> Any:
    return value


def _encode_number(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)
    if value is None or isinstance(value, int | str):
        return value
    raise TypeError(f"the codec has no form for {type(value).__name__}")


def _union_encoder(hint: Any) -> Encoder:
    if members := members_of(hint):
        by_type = {member: (name, encoder_of(member)) for name, member in members.items()}

        def encode_member(value: Any) -> Any:
            if value is None:
                return None
            kind, encoder = by_type[type(value)]
            return {"kind": kind, **encoder(value)}

        return encode_member
    encoder = encoder_of(without_none(hint)) if NoneType in get_args(hint) else _encode_number
    if encoder in (_as_it_is, _encode_number):
        return encoder
    return lambda value: None if value is None else encoder(value)


def _dataclass_encoder(kind: Any) -> Encoder:
    encoders = {name: encoder_of(hint) for name, hint in hints_of(kind).items()}
    if len(encoders) < 2:
        return lambda value: {name: encoder(getattr(value, name)) for name, encoder in encoders.items()}
    values_of, numbers = attrgetter(*encoders), [name for name, each in encoders.items() if each is _encode_number]
    changing = [(name, each) for name, each in encoders.items() if each not in (_as_it_is, _encode_number)]

    def encode_fields(value: Any) -> Any:
        document = dict(zip(encoders, values_of(value), strict=True))
        for name, encoder in changing:
            document[name] = encoder(document[name])
        for name in numbers:
            number = document[name]
            if type(number) is not float or number - number != 0.0:
                document[name] = _encode_number(number)
        return document

    return encode_fields


def _tuple_encoder(arguments: tuple[Any, ...]) -> Encoder:
    if Ellipsis not in arguments:
        encoders = [encoder_of(each) for each in arguments]
        return lambda value: [encoder(item) for encoder, item in zip(encoders, value, strict=True)]
    encoder = encoder_of(arguments[0])
    return list if encoder is _as_it_is else lambda value: [encoder(item) for item in value]


def _mapping_encoder(key_hint: Any, item_hint: Any) -> Encoder:
    encode_key, encode_item = encoder_of(key_hint), encoder_of(item_hint)
    if key_hint is str and encode_item is _as_it_is:
        return dict
    if key_hint is str:
        return lambda value: {key: encode_item(item) for key, item in value.items()}
    return lambda value: [[encode_key(key), encode_item(item)] for key, item in value.items()]
