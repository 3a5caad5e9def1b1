"""Lossless JSON round trip for the frozen dataclasses of the domain, driven by their type hints.

Enums become their value, tuples lists, mappings with string keys objects, other mappings lists of pairs,
members of a union objects with a `kind`. Infinite floats are written as strings, because JSON has none.

Each type's encoder and decoder is put together once, of those of its fields: a controller writes a dozen rows for a job
that comes and goes, and looking at hints again for each of their hundreds of fields was a quarter of its work.
"""

from __future__ import annotations

from typing import Any, TypeVar

from scheduler.domain.decoding import RefusedError, decoder_of
from scheduler.domain.encoding import encoder_of

T = TypeVar("T")


class CodecError(ValueError):
    """A document does not have the form of the type it should hold; the message names the field."""


def encode(value: object) -> Any:
    """The value as plain JSON types. A member of a union of dataclasses is encoded by `encode_as`."""
    return encode_as(type(value), value)


def encode_as(hint: Any, value: Any) -> Any:
    """As `encode`, for any type hint: a union such as `Decision`, for example."""
    return encoder_of(hint)(value)


def decode(hint: type[T], document: Any) -> T:
    """The value of type `hint` that `encode` would write as `document`.

    Raises:
        CodecError: a field is missing, unknown, of another type, or refused by the type itself.
    """
    value: T = decode_as(hint, document)
    return value


def decode_as(hint: Any, document: Any) -> Any:
    """As `decode`, for any type hint: the inverse of `encode_as`."""
    try:
        return decoder_of(hint)(document)
    except RefusedError as refused:
        raise CodecError(f"${refused.path}: {refused.why}") from None
