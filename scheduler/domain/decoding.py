"""Values from JSON: the half of the codec that reads, and refuses what has not the form of its type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from scheduler.domain.encoding import encoder_of
from scheduler.domain.type_hints import hints_of, members_of, required_of, without_none

Decoder = Callable[[Any], Any]


class RefusedError(Exception):
    """On its way out of a document: each level puts its own step before `path`, so paths cost nothing otherwise."""

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.path = path

    def within(self, step: str) -> RefusedError:
        self.path = step + self.path
        return self


@cache
def decoder_of(hint: Any) -> Decoder:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _union_decoder(hint)
    if is_dataclass(hint):
        return _dataclass_decoder(hint)
    if origin is tuple:
        return _tuple_decoder(get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key_hint, item_hint = get_args(hint)
        return _object_decoder(item_hint) if key_hint is str else _pairs_decoder(key_hint, item_hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_decoder(hint)
    return _decode_float if hint is float else _plain_decoder(hint)


def _union_decoder(hint: Any) -> Decoder:
    is_optional = NoneType in get_args(hint)
    decoder = _member_decoder(members) if (members := members_of(hint)) else decoder_of(without_none(hint))
    return (lambda document: None if document is None else decoder(document)) if is_optional else decoder


def _member_decoder(members: Mapping[str, Any]) -> Decoder:
    decoders = {name: decoder_of(member) for name, member in members.items()}

    def decode_member(document: Any) -> Any:
        _expect(document, dict)
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in decoders:
            raise RefusedError(f"{kind!r} is not one of {', '.join(sorted(decoders))}", ".kind")
        return decoders[kind]({name: item for name, item in document.items() if name != "kind"})

    return decode_member


def _dataclass_decoder(hint: Any) -> Decoder:
    decoders, required = {name: decoder_of(each) for name, each in hints_of(hint).items()}, required_of(hint)
    usual = {each.name: each.default for each in fields(hint) if is_dataclass(each.default)}
    decoders |= {name: _usual_decoder(default, decoders[name]) for name, default in usual.items()}

    def decode_fields(document: Any) -> Any:
        _expect(document, dict)
        if not document.keys() <= decoders.keys():
            unknown = min(set(document) - set(decoders))
            raise RefusedError(f"unknown field {unknown!r}; allowed: {', '.join(decoders)}")
        if missing := [each for each in required if each not in document]:
            raise RefusedError(f"field {missing[0]!r} is missing")
        values, name = dict[str, Any](), ""
        try:
            for name, item in document.items():
                values[name] = decoders[name](item)
        except RefusedError as refused:
            raise refused.within(f".{name}") from None
        try:
            return hint(**values)
        except ValueError as refused:
            raise RefusedError(str(refused)) from None

    return decode_fields


def _usual_decoder(default: Any, decoder: Decoder) -> Decoder:
    """Most jobs have many fields whose records nothing has happened to: those stay the one that all share."""
    kind: Any = type(default)
    usual = encoder_of(kind)(default)
    return lambda document: default if document == usual else decoder(document)


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    each = decoder_of(arguments[0]) if Ellipsis in arguments else None
    decoders = [decoder_of(argument) for argument in arguments if argument is not Ellipsis]

    def decode_items(document: Any) -> Any:
        _expect(document, list)
        if each is None and len(document) != len(decoders):
            raise RefusedError(f"expected {len(decoders)} items, got {len(document)}")
        items = list[Any]()
        try:
            for item, decoder in zip(document, decoders if each is None else repeat(each), strict=False):
                items.append(decoder(item))
        except RefusedError as refused:
            raise refused.within(f"[{len(items)}]") from None
        return tuple(items)

    return decode_items


def _object_decoder(item_hint: Any) -> Decoder:
    decoder = decoder_of(item_hint)

    def decode_object(document: Any) -> Any:
        _expect(document, dict)
        items, key = dict[str, Any](), ""
        try:
            for key, item in document.items():
                items[key] = decoder(item)
        except RefusedError as refused:
            raise refused.within(f".{key}") from None
        return items

    return decode_object


def _pairs_decoder(key_hint: Any, item_hint: Any) -> Decoder:
    decode_key, decode_item = decoder_of(key_hint), decoder_of(item_hint)

    def decode_pair(pair: Any) -> tuple[Any, Any]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RefusedError(f"expected a list of pairs, got {pair!r}")
        try:
            key = decode_key(pair[0])
        except RefusedError as refused:
            raise refused.within(".key") from None
        try:
            return key, decode_item(pair[1])
        except RefusedError as refused:
            raise refused.within(f"[{key}]") from None

    def decode_pairs(document: Any) -> Any:
        _expect(document, list)
        decoded = dict(map(decode_pair, document))
        if len(decoded) < len(document):
            raise RefusedError("a key stands twice")
        return decoded

    return decode_pairs


def _enum_decoder(hint: type[Enum]) -> Decoder:
    members = {member.value: member for member in hint}

    def decode_enum(document: Any) -> Any:
        try:
            return members[document]
        except (KeyError, TypeError):
            raise RefusedError(f"{document!r} is not one of {', '.join(map(str, members))}") from None

    return decode_enum


def _decode_float(document: Any) -> Any:
    if type(document) is float:
        return document
    if isinstance(document, str) and document in ("inf", "-inf", "nan"):
        return float(document)
    if isinstance(document, bool) or not isinstance(document, int | float):
        raise RefusedError(f"expected float, got {document!r:.80}")
    try:
        return float(document)
    except OverflowError:
        raise RefusedError("the number is too large") from None


def _plain_decoder(hint: type[Any]) -> Decoder:
    def decode_plain(document: Any) -> Any:
        if type(document) is not hint:
            _expect(document, hint)
            if isinstance(document, bool):
                raise RefusedError(f"expected {hint.__name__}, got {document!r}")
        return document

    return decode_plain


def _expect(document: Any, kind: type) -> None:
    if not isinstance(document, kind):
        raise RefusedError(f"expected {kind.__name__}, got {document!r:.80}")
