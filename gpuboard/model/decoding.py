"""Decoding into types, from several threads.

msgspec prepares a type when it is first decoded into, and runs Python code meanwhile. A second thread that decodes into
the same type, or one that contains it, would use it half prepared and crash (msgspec 0.22.0). Here one thread prepares.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_preparing = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of JSON into ``kind``."""
    found = _decoders.get(kind)
    if found is None:
        with _preparing:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


@overload
def from_json(data: bytes | str | msgspec.Raw) -> Any: ...
@overload
def from_json(data: bytes | str | msgspec.Raw, kind: type[T]) -> T: ...
def from_json(data: bytes | str | msgspec.Raw, kind: Any = Any) -> Any:
    """Return ``data``, JSON, as a ``kind``. Raises msgspec.DecodeError."""
    return json_decoder(kind).decode(data)


def from_msgpack(data: bytes, kind: type[T]) -> T:
    """Return ``data``, MessagePack, as a ``kind``. Raises msgspec.DecodeError."""
    json_decoder(kind)
    return msgspec.msgpack.decode(data, type=kind)


@overload
def convert(value: object, kind: type[T]) -> T: ...
@overload
def convert(value: object, kind: Any) -> Any: ...
def convert(value: object, kind: Any) -> Any:
    """Return ``value``, of builtin types, as a ``kind``. Raises msgspec.ValidationError."""
    json_decoder(kind)
    return msgspec.convert(value, kind)
