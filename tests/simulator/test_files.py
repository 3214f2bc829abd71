"""Files appear whole, whatever comes between."""

from pathlib import Path

import pytest

from meshwise.simulator.files import unsafe_character, whole_file


def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with whole_file(target) as draft:
        draft.write_text("new")
        assert draft.suffix == ".json" and draft.parent == tmp_path
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_what_stops_the_writing_leaves_the_old_file_alone(tmp_path: Path, stop: type[BaseException]) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(stop), whole_file(target) as draft:
        draft.write_text("ne")
        raise stop
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), whole_file(tmp_path) as draft:
        draft.write_text("x")


def test_every_unsafe_character_is_known() -> None:
    """Of all of Unicode: those of category Cc but tab and newline, the bidirectional controls, and lone halves."""
    import unicodedata

    for point in range(0x110000):
        letter = chr(point)
        unsafe = unsafe_character(letter) is not None
        control = unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") and letter not in "\t\n"
        turning = unicodedata.bidirectional(letter) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        if control or turning:
            assert unsafe, hex(point)
        if letter.isprintable():
            assert not unsafe, hex(point)
