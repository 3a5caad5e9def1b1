"""Lossless JSON encoding of the domain's frozen dataclasses, derived from their type hints.

Enums become their value, tuples become lists, and mappings become objects or, if the keys are not strings, lists of
pairs. A member of a union of dataclasses becomes an object with the class name in `kind`. Infinite floats become
strings, because JSON has no form for them.

Encoders and decoders are built once per type, because a controller encodes hundreds of fields for every job. The codec
is our own because the domain, which workers import too, needs no package besides the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from itertools import repeat
from operator import attrgetter, or_
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class CodecError(ValueError):
    """A document does not match its type. The message names the field."""


def encode(value: object) -> Any:
    """Return the value as plain JSON types. For a member of a union, use `encode_as`."""
    return encode_as(type(value), value)


def encode_as(hint: Any, value: Any) -> Any:
    """Return the value as plain JSON types, encoded as the type hint `hint`, for example the union `Decision`."""
    return encoder_for(hint)(value)


def decode(hint: type[T], document: Any) -> T:
    """Decode a document that `encode` wrote.

    Raises:
        CodecError: a field is missing, unknown, of another type, or rejected by the type itself.
    """
    value: T = decode_as(hint, document)
    return value


def decode_as(hint: Any, document: Any) -> Any:
    """Decode a document that `encode_as` wrote with the same type hint."""
    return _decode(hint, document, False)


def decode_stored(hint: type[T], document: Any) -> T:
    """Decode a document of a database, which a later version may have written: fields that are unknown are ignored.

    Raises:
        CodecError: a field is missing, of another type, or rejected by the type itself.
    """
    value: T = _decode(hint, document, True)
    return value


def decode_stored_as(hint: Any, document: Any) -> Any:
    """Decode a document of a database that `encode_as` wrote with the same type hint. See `decode_stored`."""
    return _decode(hint, document, True)


def _decode(hint: Any, document: Any, is_tolerant: bool) -> Any:
    try:
        return decoder_for(hint, is_tolerant)(document)
    except MismatchError as mismatch:
        raise CodecError(f"${mismatch.path}: {mismatch.detail}") from None


def strip_none(hint: Any) -> Any:
    rest = tuple(member for member in get_args(hint) if member is not NoneType)
    return reduce(or_, rest)


def union_members(hint: Any) -> dict[str, Any]:
    """Return the dataclasses of a union by class name, or nothing if the hint is no union of dataclasses."""
    members = [member for member in get_args(hint) if is_dataclass(member)]
    return {member.__name__: member for member in members if isinstance(member, type)} if len(members) > 1 else {}


def field_hints(kind: Any) -> dict[str, Any]:
    """Return the type hints of all fields except derived ones, which are computed from the others."""
    derived = {f.name for f in fields(kind) if f.metadata.get("derived")}
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in derived}


def required_fields(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


Encoder = Callable[[Any], Any]
_PASS_THROUGH_TYPES = frozenset({NoneType, bool, int, str})


@cache
def encoder_for(hint: Any) -> Encoder:
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
    return _pass_through if hint in _PASS_THROUGH_TYPES else _encode_number


def _pass_through(value: Any) -> Any:
    return value


def _encode_number(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)
    if value is None or isinstance(value, int | str):
        return value
    raise TypeError(f"the codec cannot encode {type(value).__name__}")


def _union_encoder(hint: Any) -> Encoder:
    if members := union_members(hint):
        by_type = {member: (name, encoder_for(member)) for name, member in members.items()}

        def encode_member(value: Any) -> Any:
            if value is None:
                return None
            kind, encoder = by_type[type(value)]
            return {"kind": kind, **encoder(value)}

        return encode_member
    encoder = encoder_for(strip_none(hint)) if NoneType in get_args(hint) else _encode_number
    if encoder in (_pass_through, _encode_number):
        return encoder
    return lambda value: None if value is None else encoder(value)


def _dataclass_encoder(kind: Any) -> Encoder:
    encoders = {name: encoder_for(hint) for name, hint in field_hints(kind).items()}
    if len(encoders) < 2:
        return lambda value: {name: encoder(getattr(value, name)) for name, encoder in encoders.items()}
    values_of, numbers = attrgetter(*encoders), [name for name, each in encoders.items() if each is _encode_number]
    changing = [(name, each) for name, each in encoders.items() if each not in (_pass_through, _encode_number)]

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
        encoders = [encoder_for(each) for each in arguments]
        return lambda value: [encoder(item) for encoder, item in zip(encoders, value, strict=True)]
    encoder = encoder_for(arguments[0])
    return list if encoder is _pass_through else lambda value: [encoder(item) for item in value]


def _mapping_encoder(key_hint: Any, item_hint: Any) -> Encoder:
    encode_key, encode_item = encoder_for(key_hint), encoder_for(item_hint)
    if key_hint is str and encode_item is _pass_through:
        return dict
    if key_hint is str:
        return lambda value: {key: encode_item(item) for key, item in value.items()}
    return lambda value: [[encode_key(key), encode_item(item)] for key, item in value.items()]


Decoder = Callable[[Any], Any]


class MismatchError(Exception):
    """A mismatch inside a document. Each level prepends its own step to `path` while the exception passes through."""

    def __init__(self, detail: str, path: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.path = path

    def prefix_path(self, step: str) -> MismatchError:
        self.path = step + self.path
        return self


@cache
def decoder_for(hint: Any, is_tolerant: bool) -> Decoder:
    """Return the decoder of a type. A tolerant one ignores unknown fields."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _union_decoder(hint, is_tolerant)
    if is_dataclass(hint):
        return _dataclass_decoder(hint, is_tolerant)
    if origin is tuple:
        return _tuple_decoder(get_args(hint), is_tolerant)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key_hint, item_hint = get_args(hint)
        return (
            _object_decoder(item_hint, is_tolerant)
            if key_hint is str
            else _pairs_decoder(key_hint, item_hint, is_tolerant)
        )
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_decoder(hint)
    return _decode_float if hint is float else _scalar_decoder(hint)


def _union_decoder(hint: Any, is_tolerant: bool) -> Decoder:
    is_optional = NoneType in get_args(hint)
    decoder = (
        _member_decoder(members, is_tolerant)
        if (members := union_members(hint))
        else decoder_for(strip_none(hint), is_tolerant)
    )
    return (lambda document: None if document is None else decoder(document)) if is_optional else decoder


def _member_decoder(members: Mapping[str, Any], is_tolerant: bool) -> Decoder:
    decoders = {name: decoder_for(member, is_tolerant) for name, member in members.items()}

    def decode_member(document: Any) -> Any:
        _require_type(document, dict)
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in decoders:
            raise MismatchError(f"{kind!r} is not one of {', '.join(sorted(decoders))}", ".kind")
        return decoders[kind]({name: item for name, item in document.items() if name != "kind"})

    return decode_member


def _dataclass_decoder(hint: Any, is_tolerant: bool) -> Decoder:
    decoders, required = (
        {name: decoder_for(each, is_tolerant) for name, each in field_hints(hint).items()},
        required_fields(hint),
    )
    defaults = {each.name: each.default for each in fields(hint) if is_dataclass(each.default)}
    decoders |= {name: _default_decoder(default, decoders[name]) for name, default in defaults.items()}

    def decode_fields(document: Any) -> Any:
        _require_type(document, dict)
        if not document.keys() <= decoders.keys():
            if is_tolerant:
                return decode_fields({name: item for name, item in document.items() if name in decoders})
            unknown = min(set(document) - set(decoders))
            raise MismatchError(f"unknown field {unknown!r}; allowed: {', '.join(decoders)}")
        if missing := [each for each in required if each not in document]:
            raise MismatchError(f"field {missing[0]!r} is missing")
        values, name = dict[str, Any](), ""
        try:
            for name, item in document.items():
                values[name] = decoders[name](item)
        except MismatchError as mismatch:
            raise mismatch.prefix_path(f".{name}") from None
        try:
            return hint(**values)
        except ValueError as error:
            raise MismatchError(str(error)) from None

    return decode_fields


def _default_decoder(default: Any, decoder: Decoder) -> Decoder:
    """Return the shared default object if the document equals it. Most fields of most jobs hold their default."""
    kind: Any = type(default)
    encoded = encoder_for(kind)(default)
    return lambda document: default if document == encoded else decoder(document)


def _tuple_decoder(arguments: tuple[Any, ...], is_tolerant: bool) -> Decoder:
    each = decoder_for(arguments[0], is_tolerant) if Ellipsis in arguments else None
    decoders = [decoder_for(argument, is_tolerant) for argument in arguments if argument is not Ellipsis]

    def decode_items(document: Any) -> Any:
        _require_type(document, list)
        if each is None and len(document) != len(decoders):
            raise MismatchError(f"expected {len(decoders)} items, got {len(document)}")
        items = list[Any]()
        try:
            for item, decoder in zip(document, decoders if each is None else repeat(each), strict=False):
                items.append(decoder(item))
        except MismatchError as mismatch:
            raise mismatch.prefix_path(f"[{len(items)}]") from None
        return tuple(items)

    return decode_items


def _object_decoder(item_hint: Any, is_tolerant: bool) -> Decoder:
    decoder = decoder_for(item_hint, is_tolerant)

    def decode_object(document: Any) -> Any:
        _require_type(document, dict)
        items, key = dict[str, Any](), ""
        try:
            for key, item in document.items():
                items[key] = decoder(item)
        except MismatchError as mismatch:
            raise mismatch.prefix_path(f".{key}") from None
        return items

    return decode_object


def _pairs_decoder(key_hint: Any, item_hint: Any, is_tolerant: bool) -> Decoder:
    decode_key, decode_item = decoder_for(key_hint, is_tolerant), decoder_for(item_hint, is_tolerant)

    def decode_pair(pair: Any) -> tuple[Any, Any]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise MismatchError(f"expected a list of pairs, got {pair!r}")
        try:
            key = decode_key(pair[0])
        except MismatchError as mismatch:
            raise mismatch.prefix_path(".key") from None
        try:
            return key, decode_item(pair[1])
        except MismatchError as mismatch:
            raise mismatch.prefix_path(f"[{key}]") from None

    def decode_pairs(document: Any) -> Any:
        _require_type(document, list)
        decoded = dict(map(decode_pair, document))
        if len(decoded) < len(document):
            raise MismatchError("duplicate key")
        return decoded

    return decode_pairs


def _enum_decoder(hint: type[Enum]) -> Decoder:
    members = {member.value: member for member in hint}

    def decode_enum(document: Any) -> Any:
        try:
            return members[document]
        except (KeyError, TypeError):
            raise MismatchError(f"{document!r} is not one of {', '.join(map(str, members))}") from None

    return decode_enum


def _decode_float(document: Any) -> Any:
    if type(document) is float:
        return document
    if isinstance(document, str) and document in ("inf", "-inf", "nan"):
        return float(document)
    if isinstance(document, bool) or not isinstance(document, int | float):
        raise MismatchError(f"expected float, got {document!r:.80}")
    try:
        return float(document)
    except OverflowError:
        raise MismatchError("the number is too large") from None


def _scalar_decoder(hint: type[Any]) -> Decoder:
    def decode_plain(document: Any) -> Any:
        if type(document) is not hint:
            _require_type(document, hint)
            if isinstance(document, bool):
                raise MismatchError(f"expected {hint.__name__}, got {document!r}")
        return document

    return decode_plain


def _require_type(document: Any, kind: type) -> None:
    if not isinstance(document, kind):
        raise MismatchError(f"expected {kind.__name__}, got {document!r:.80}")
