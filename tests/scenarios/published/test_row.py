import pytest

from meshwise.scenarios.published.row import Row, Skip


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (8, 8.0), (7.5, 7.5), ("80 GB", 80.0), ("1,024", 1024.0), ("32k", 32e3), ("4M tokens", 4e6), ("2 km", 2.0),
        (None, None), ("", None), ("n/a", None), (0, None),
    ],
)  # fmt: skip
def test_a_number_is_read_up_to_its_unit_and_nothing_is_none(value: object, number: float | None) -> None:
    assert Row({"field": value}).number("field") == number


@pytest.mark.parametrize("value", [True, "two", "8x400", "1-4", [1], {}, float("nan"), float("inf"), -1, 10**30])
def test_what_is_no_number_names_the_field(value: object) -> None:
    with pytest.raises(Skip, match=r"^field is a number above 0, met "):
        Row({"field": value}).number("field")


def test_sequences_are_in_thousands_of_1024() -> None:
    assert Row({"seq_len": "4k"}).count("seq_len") == 4096


def test_a_count_is_whole_and_bounded() -> None:
    assert Row({"tp": 2.0}).count("tp") == 2
    for value in (1.5, 11):
        with pytest.raises(Skip, match="tp is a whole number of at most 10"):
            Row({"tp": value}).count("tp", 10)


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        (True, True), (False, False), (None, None), ("", None), ("yes", True), ("overlapped", True),
        ("no overlap", False),
        ("off (public launcher keeps overlap off)", False), ("grad-reduce and param-gather overlapped", True),
    ],
)  # fmt: skip
def test_words_for_on_and_off(value: object, flag: bool | None) -> None:
    assert Row({"dp_overlap": value}).flag("dp_overlap") is flag


def test_an_assumption_is_noted_once() -> None:
    row = Row({})
    assert [row.count_or_default("vpp", 1), row.count_or_default("vpp", 1)] == [1, 1]
    assert row.assumed == ["vpp 1 (not stated)"]
