"""Chakra traces written by hand take the time that a hand computes; broken ones get one message."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.reports.traces import chakra_reader as chakra_nodes
from meshwise.reports.traces.chakra_reader import read_chakra
from meshwise.reports.traces.protobuf import (
    encode_message,
    encode_number,
    encode_packed,
    encode_tag,
    encode_text,
    encode_varint,
)
from meshwise.simulator.engine import simulate, step_ticks
from meshwise.simulator.program import StreamKind, TaskKind

LOAD, STORE, COMP, SEND, RECEIVE, COLLECTIVE = 2, 3, 4, 5, 6, 7
MICROSECOND = 10**6  # ticks


def attribute(name: str, value: int | str) -> bytes:
    """An AttributeProto (field 10 of a node): int64_val 9 or string_val 29."""
    said = (
        encode_tag(29, 2) + encode_varint(len(value)) + value.encode()
        if isinstance(value, str)
        else encode_number(9, value)
    )
    return encode_message(10, encode_text(1, name), said)


def node(
    id: int, what: int = COMP, micros: int = 1, control: Iterable[int] = (), data: Iterable[int] = (), **attributes
) -> bytes:
    head = (
        encode_number(1, id)
        + encode_text(2, f"n{id}")
        + encode_number(3, what)
        + encode_packed(4, control)
        + encode_packed(5, data)
    )
    body = head + encode_number(7, micros) + b"".join(attribute(*each) for each in attributes.items())
    return encode_varint(len(body)) + body


HEAD = b"\x07\x0a\x050.0.4"


def folder(path: Path, *ranks: Iterable[bytes], groups: object = None) -> Path:
    for rank, nodes in enumerate(ranks):
        (path / f"t.{rank}.et").write_bytes(HEAD + b"".join(nodes))
    if groups is not None:
        (path / "comm_group.json").write_text(json.dumps(groups))
    return path


def test_nodes_of_a_rank_wait_for_each_other_and_computing_is_in_order(tmp_path: Path) -> None:
    nodes = [node(0, micros=5), node(1, micros=7), node(2, STORE, 20, data=[0]), node(3, micros=1, data=[2])]
    # 0 and 1 compute [0, 5], [5, 12]; 2 copies [5, 25] beneath; 3 waits for it: [25, 26]
    assert step_ticks(read_chakra(folder(tmp_path, nodes))) == 26 * MICROSECOND


def test_transfers_and_collectives_start_when_all_ranks_are_there(tmp_path: Path) -> None:
    first = [
        node(0, micros=5),
        node(1, SEND, 2, data=[0], comm_src=0, comm_dst=1, comm_tag=3, comm_size=8),
        node(2, COLLECTIVE, 10, data=[0], pg_name="07", comm_type=0, comm_size=8),
    ]
    second = [
        node(9, RECEIVE, 3, comm_src=0, comm_tag=3, comm_size=8),
        node(8, micros=4, control=[9]),
        node(4, COLLECTIVE, 10, data=[8], pg_name="7", comm_type=0, comm_size=8),
    ]
    program = read_chakra(folder(tmp_path, first, second, [node(0, micros=1)], groups={"7": [0, 1]}))
    # the transfer takes the longer of both ends: [5, 8]; rank 1 computes [8, 12]; the sum of both [12, 22]
    assert step_ticks(program) == 22 * MICROSECOND
    timeline = simulate(program)
    summed = [s for s in timeline.spans if s.kind is TaskKind.DATA_COMMUNICATION]
    assert [(s.rank_class, s.start, s.end) for s in summed] == [(r, 12e-6, 22e-6) for r in (0, 1)]


def test_communications_of_one_group_meet_in_the_order_of_each_file(tmp_path: Path) -> None:
    one = [node(0, COLLECTIVE, 3, comm_size=1), node(1, COLLECTIVE, 5, comm_size=2)]
    other = [node(7, COLLECTIVE, 3, comm_size=1), node(6, COLLECTIVE, 5, comm_size=2, control=[7])]
    assert step_ticks(read_chakra(folder(tmp_path, one, other))) == 8 * MICROSECOND


def test_our_attributes_say_ticks_streams_and_kinds(tmp_path: Path) -> None:
    body = node(0, micros=1, ticks=1_400_123, stream="tensor", kind="backward")
    program = read_chakra(folder(tmp_path, [body, node(1, micros=1, stream="no", kind="no")]))
    assert step_ticks(program) == 1_400_123  # node 1 computes beside it
    assert [stream.kind for stream in program.streams] == [StreamKind.TENSOR, StreamKind.COMPUTE]
    assert [work.kind for work in program.work] == [TaskKind.BACKWARD, TaskKind.FORWARD]


TRANSFER = {"comm_src": 0, "comm_dst": 1}


@pytest.mark.parametrize(
    ("ranks", "groups", "held"),
    [
        ([[node(0), node(0)]], None, "a number of its own"),
        ([[node(0, data=[5])]], None, "waits for nodes of its file, met 5"),
        ([[node(0, data=[1]), node(1, control=[0])]], None, "met 2 that wait for each other"),
        ([[node(0, data=[0])]], None, "met itself"),
        ([[node(0, what=1)]], None, "its type is"),
        ([[node(0, what=99)]], None, "its type is"),
        ([[node(0, COLLECTIVE, pg_name="4")]], {"5": [0]}, "pg_name: a group"),
        ([[node(0, COLLECTIVE, pg_name="5")], [node(0)]], {"5": [1]}, "with rank 0"),
        ([[node(0, COLLECTIVE, pg_name="x" * 500)]], None, "pg_name: a group"),
        ([[node(0, COLLECTIVE)], [node(0)]], None, "met none of rank 1"),
        ([[node(0, COLLECTIVE, comm_size=1)], [node(0, COLLECTIVE, comm_size=2)]], None, "comm_size: the same"),
        ([[node(0, COLLECTIVE, comm_type=1)], [node(0, COLLECTIVE, comm_type=2)]], None, "comm_type: the same"),
        ([[node(0, COLLECTIVE, micros=0)], [node(0, COLLECTIVE, micros=0)]], None, "with a duration, met none"),
        ([[node(0, SEND, **TRANSFER)], [node(0)]], None, "met none of rank 1"),
        ([[node(0, SEND, comm_dst=1)]], None, "a transfer between rank 0 and another of 1"),
        ([[node(0, SEND, comm_dst=0)], [node(0)]], None, "met 0 to 0"),
        ([[node(0, SEND)], [node(0)]], None, "comm_dst: a number, met none"),
        ([[node(0, RECEIVE, **TRANSFER)], [node(0)]], None, "met 0 to 1"),
        ([[node(0, ticks=2**62)]], None, "ticks: a number from 0"),
        ([[node(0, micros=2**60)]], None, "duration_micros: a number from 0"),
        ([[node(0)]], {"1": [5]}, "groups of ranks"),
        ([[node(0)]], {"1": [0, 0]}, "groups of ranks"),
        ([[node(0)]], {"1": [True]}, "groups of ranks"),
        ([[node(0)]], {"a": [0]}, "groups of ranks"),
        ([[node(0)]], [], "groups of ranks"),
        ([[b"\x05\x08"]], None, "a message has at most"),
        ([[b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]], None, "at most 64 bits"),
        ([[b"\x02\x0a\x01"]], None, "byte 8, node 0"),
        ([[b"\x02\x0b\x00"]], None, "a wire type"),
        ([[b"\x03\x0a\x01x"]], None, "field 1 is a number"),
    ],
)
def test_what_is_wrong_is_said_once(ranks: list[list[bytes]], groups: object, held: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=held):
        read_chakra(folder(tmp_path, *ranks, groups=groups))


def test_two_ranks_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    ours = [node(0, COLLECTIVE, pg_name="1"), node(1, COLLECTIVE, pg_name="2", control=[0])]
    theirs = [node(0, COLLECTIVE, pg_name="2"), node(1, COLLECTIVE, pg_name="1", control=[0])]
    with pytest.raises(ValueError, match="met 2 that wait for each other"):
        read_chakra(folder(tmp_path, ours, theirs, groups=groups))


def test_files_are_of_all_ranks_of_one_name_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="met none"):
        read_chakra(tmp_path / "none")
    with pytest.raises(ValueError, match="met 0 files"):
        read_chakra(tmp_path)
    (tmp_path / "t.1.et").write_bytes(HEAD)
    with pytest.raises(ValueError, match="no file of rank 0"):
        read_chakra(tmp_path)
    (tmp_path / "u.0.et").write_bytes(HEAD)
    with pytest.raises(ValueError, match="of 2 names"):
        read_chakra(tmp_path)
    (tmp_path / "u.0.et").unlink()
    folder(tmp_path, [node(0)], [node(0), node(1)])
    monkeypatch.setattr(chakra_nodes, "MAX_FILE", 15)
    with pytest.raises(ValueError, match="at most 15 bytes"):
        read_chakra(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("meshwise.reports.traces.chakra_reader.MAX_NODES", 2)
    with pytest.raises(ValueError, match="nodes, met more"):
        read_chakra(tmp_path)


WHOLE = HEAD + b"".join(
    (
        node(0, micros=5),
        node(1, LOAD, 3, control=[0], tensor_size=9),
        node(2, COLLECTIVE, 4, data=[0, 1], pg_name="1", comm_type=2, comm_size=64, ticks=77, stream="data"),
        node(3, micros=1, data=[2], kind="optimizer"),
    )
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=3), st.integers(0, len(WHOLE)))
def test_broken_bytes_are_a_program_or_one_message(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(WHOLE)
    for place, byte in changes:
        data[place] = byte
    home = tmp_path_factory.getbasetemp() / "broken"
    home.mkdir(exist_ok=True)
    (home / "t.0.et").write_bytes(bytes(data[: end if changes == [] else len(data)]))
    (home / "comm_group.json").write_text('{"1": [0]}')
    try:
        program = read_chakra(home)
    except ValueError as error:
        assert "t.0.et" in str(error)
    else:
        assert step_ticks(program) >= 0
