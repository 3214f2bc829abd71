"""Protocol Buffers on the wire: fields as bytes (protobuf.dev, "Encoding").

Only what traces need: numbers, text, bytes and messages. A varint may be longer than it has to be, so that one of a
fixed width can be written over later.
"""

import struct
from collections.abc import Iterable

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""


def varint(value: int, width: int = 1) -> bytes:
    """Return a number from 0 on, in 7 bits a byte, the lowest first, in ``width`` bytes or as many as it takes.

    >>> varint(300).hex(), varint(1, 3).hex()
    ('ac02', '818000')
    """
    found = bytearray()
    while value > 0x7F or len(found) + 1 < width:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def tag(field: int, wire: int) -> bytes:
    """Return what stands before a field's value."""
    return varint(field << 3 | wire)


def number(field: int, value: int, width: int = 1) -> bytes:
    """Return a field of an unsigned number, an enum or a truth."""
    return tag(field, VARINT) + varint(value, width)


def real(field: int, value: float) -> bytes:
    """Return a field of a double.

    >>> real(3, 1.0).hex()
    '19000000000000f03f'
    """
    return tag(field, FIXED64) + struct.pack("<d", value)


def message(field: int, *parts: bytes) -> bytes:
    """Return a field of bytes: a message whose fields are ``parts``.

    >>> message(3, number(1, 150)).hex()
    '1a03089601'
    """
    body = b"".join(parts)
    return tag(field, BYTES) + varint(len(body)) + body


def text(field: int, value: str) -> bytes:
    """Return a field of text; what UTF-8 has no bytes for becomes a question mark."""
    return message(field, value.encode("utf-8", "replace"))


def packed(field: int, values: Iterable[int]) -> bytes:
    """Return a field of several unsigned numbers; nothing for none.

    >>> packed(4, [3, 270]).hex(), packed(4, [])
    ('2203038e02', b'')
    """
    body = b"".join(map(varint, values))
    return message(field, body) if body else b""
