"""What commands print: columns under each other, JSON without infinities, and nothing that moves the cursor."""

import json
from math import inf, nan

import pytest

from meshwise.scenarios.console import Ticker, emit, note, print_rows, print_table


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"a": [1.5, inf, (nan,)], 3: {"b": -inf}})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None, [None]], "3": {"b": None}}


def test_columns_lie_under_their_names_numbers_flush_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "seconds"), [("a", 1), ("longer", 12.5)])
    assert capsys.readouterr().out == "name    seconds\na             1\nlonger     12.5\n"
    print_rows([("a", 1), ("longer", "x")])
    assert capsys.readouterr().out == "a       1\nlonger  x\n"


def test_what_users_wrote_is_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([("\x1b[2J", "\x07")])
    print_table(("\x1b[2J",), [("\x07",)])
    note("\x1b[2J")
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err and "\x07" not in printed.out
    assert printed.err.strip() and printed.out.strip()


def test_no_ticker_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ticker = Ticker()
    ticker("working")
    ticker.clear()
    assert capsys.readouterr().err == ""
