"""Protocol Buffers that are read are those that were written, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.traces.protobuf import (
    encode_double,
    encode_message,
    encode_number,
    encode_packed,
    encode_text,
    encode_varint,
    read_fields,
    read_packed,
    read_varint,
)

NUMBERS = st.integers(0, 2**64 - 1)


@given(NUMBERS, st.integers(1, 10))
def test_a_number_of_any_width_reads_back(value: int, width: int) -> None:
    written = encode_varint(value, width)
    assert len(written) >= width
    assert read_varint(written, 0) == (value, len(written))


@given(st.integers(1, 2**29 - 1), NUMBERS, st.text(st.characters(exclude_categories=["Cs"])), st.lists(NUMBERS))
def test_fields_read_back(field: int, value: int, words: str, values: list[int]) -> None:
    body = (
        encode_number(field, value)
        + encode_text(field, words)
        + encode_double(field, 0.5)
        + encode_message(field, encode_packed(1, values))
    )
    found = [(met, wire) for met, wire, _ in read_fields(body)]
    assert found == [(field, 0), (field, 2), (field, 1), (field, 2)]
    contents = [content for _, _, content in read_fields(body)]
    assert contents[0] == value and contents[1] == words.encode()
    assert [each for _, _, content in read_fields(contents[3]) for each in read_packed(content)] == values


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x08", "ends before the data"),
        (b"\x08\x80", "ends before the data"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "at most 64 bits"),
        (b"\x08" + b"\x80" * 10 + b"\x00", "at most 64 bits"),
        (b"\x0a\x05ab", "a field of 5 bytes"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a field of 18446744073709551615 bytes"),
        (b"\x09abc", "a field of 8 bytes"),
        (b"\x0b", "a wire type is"),
        (b"\x00\x00", "a field has a number from 1"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_fields(data))


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_an_error(data: bytes) -> None:
    try:
        found = list(read_fields(data))
    except ValueError as error:
        assert str(error).startswith("byte ")
    else:
        assert all(field > 0 for field, _, _ in found)
