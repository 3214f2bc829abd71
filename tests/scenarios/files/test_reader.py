import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwise.scenarios.files import reader
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import MAX_BYTES, MAX_DEPTH, parse_document, read_document

EVERY_PARSER = ["CLoader", "Loader"]


def faults_of(content: bytes) -> list[tuple[int, int, str]]:
    with pytest.raises(ScenarioError) as caught:
        parse_document(content, "x.yaml")
    return [(fault.line, fault.column, fault.message) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("0o17", 15),
        ("0x1F", 31),
        ("+.5", 0.5),
        ("-3", -3),
        ("12:30:45", "12:30:45"),
        ("2001-01-01", "2001-01-01"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("2 us", "2 us"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    met = parse_document(f"a: {text}".encode()).data["a"]
    assert met == value
    assert type(met) is type(value)


def test_places_are_those_of_keys_and_items() -> None:
    document = parse_document(b"a:\n  b: 1\n  c: [x,\n      y]\n")
    assert document.places == {
        ("a",): (1, 1),
        ("a", "b"): (2, 3),
        ("a", "c"): (3, 3),
        ("a", "c", 0): (3, 7),
        ("a", "c", 1): (4, 7),
    }


def test_a_fault_of_a_missing_field_is_placed_at_what_encloses_it() -> None:
    fault = parse_document(b"x: 1\na:\n  b: 1\n", "f.yaml").fault(("a", "lost"), "this field is required")
    assert str(fault) == "f.yaml:2:1: a.lost: this field is required"


def test_a_duplicate_key_names_both_lines() -> None:
    assert faults_of(b"a: 1\nb: 2\na: 3\n") == [(3, 1, "a key occurs once, met it on line 1 and on line 3")]


def test_all_duplicates_are_found_at_once() -> None:
    assert [fault[:2] for fault in faults_of(b"a: 1\na: 2\nb: {c: 1, c: 2}\n")] == [(2, 1), (3, 11)]


@pytest.mark.parametrize(
    ("content", "line", "column", "words"),
    [
        (b"a: &x 1\n", 1, 4, "anchors"),
        (b"a: 1\nb: *x\n", 2, 4, "aliases"),
        (b"a: !!python/object:os.system x\n", 1, 4, "tags are not read"),
        (b"a: .inf\n", 1, 4, "finite"),
        (b"a: 1e999\n", 1, 4, "finite"),
        (b"a: 012\n", 1, 4, "does not begin with 0, which some readers take for octal, met 012; nearest: 12"),
        (b'a: "\\e[31m"\n', 1, 4, "text is printable, met U+001B"),
        (b'"a\\u202e": 1\n', 1, 1, "text is printable, met U+202E"),
        (b"a: " + b"9" * 5000, 1, 4, "at most 100 characters"),
        (b"a: 1\n---\nb: 2\n", 2, 1, "one document"),
        (b"? [a]\n: 1\n", 1, 3, "a key is plain text"),
        (b"a: 1\nb: {c: 1\n", 3, 1, "not YAML"),
        (b"a: 1\nb: \xff\n", 2, 4, "UTF-8"),
        (b"a: 1\nb: x\x07y\n", 2, 5, "control character"),
        (b"\ta: 1\n", 1, 1, "not YAML"),
    ],
)
def test_what_is_not_strict_yaml_has_a_place(content: bytes, line: int, column: int, words: str) -> None:
    first = faults_of(content)[0]
    assert first[:2] == (line, column)
    assert words in first[2]


@pytest.mark.parametrize("opening", [b"[", b"{a: ", b"- ", b"? "])
def test_nesting_is_bounded(opening: bytes) -> None:
    assert faults_of(opening * 100_000)


def test_the_deepest_nesting_that_is_read() -> None:
    assert parse_document(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)).data
    assert "deep" in faults_of(b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2))[0][2]


def test_size_and_number_of_values_are_bounded() -> None:
    assert "bytes" in faults_of(b"#" * (MAX_BYTES + 1))[0][2]
    assert "values" in faults_of(b"[" + b"1," * reader.MAX_VALUES + b"1]")[0][2]


def test_an_alias_bomb_is_refused_and_not_expanded() -> None:
    levels = b"".join(b"l%d: &l%d [*l%d, *l%d]\n" % (i + 1, i + 1, i, i) for i in range(40))
    assert len(faults_of(b"l0: &l0 [x]\n" + levels)) == reader.MAX_FAULTS


def test_keys_and_values_cannot_write_to_the_terminal() -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_document(b'"\\e[31m": 1\n"\\e[31m": 2\n')
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("loader", EVERY_PARSER)
@given(
    content=st.one_of(
        st.binary(max_size=300), st.text(max_size=300).map(lambda text: text.encode(errors="surrogatepass"))
    )
)
def test_arbitrary_bytes_give_data_or_a_scenario_error(loader: str, content: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if loader == "Loader":
            patch.delattr(yaml, "CLoader", raising=False)
        try:
            parse_document(content)
        except ScenarioError as error:
            assert error.faults


SYNTAX = st.lists(
    st.sampled_from(
        [
            "a",
            "b: ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            ",",
            ": ",
            "\n",
            "  ",
            "&x ",
            "*x",
            "!t ",
            "'",
            '"',
            "|",
            ">",
            "1e9",
            "#",
            "---\n",
            "? ",
        ]
    ),
    max_size=40,
).map("".join)


@pytest.mark.parametrize("loader", EVERY_PARSER)
@given(text=SYNTAX)
def test_scraps_of_yaml_give_data_or_a_scenario_error(loader: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if loader == "Loader":
            patch.delattr(yaml, "CLoader", raising=False)
        try:
            parse_document(text.encode())
        except ScenarioError as error:
            assert error.faults


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**60), 10**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abc 1e9.:-'\"#é", max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc:1 ", max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_json_is_read_as_json_reads_it(data: object) -> None:
    assert parse_document(json.dumps(data).encode()).data == data


@given(st.dictionaries(st.text("abc:1e9~ ", max_size=5), PLAIN, max_size=4))
def test_what_is_written_is_read_back(data: dict[str, object]) -> None:
    from meshwise.scenarios.files.reader import dump_yaml

    met = parse_document(dump_yaml(data).encode()).data
    assert met == data
    assert json.dumps(met) == json.dumps(data)  # 1 is not true, and 1.0 is not 1


@pytest.mark.parametrize("name", ["missing.yaml", ".", "nul\0byte"])
def test_what_cannot_be_read_is_one_fault(tmp_path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScenarioError) as caught:
        read_document(name)
    assert len(caught.value.faults) == 1
