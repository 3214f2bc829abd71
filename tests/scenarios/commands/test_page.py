"""Commands write what they know as one page."""

import json
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["simulate", "local/dp2", "--timeline", "page.html"], "steps"),
        (["search", "local/dp2", "--algorithm", "best_first", "--report", "page.html"], "searches"),
        (["compare", "local/dp2", "--algorithms", "best_first,random", "--report", "page.html"], "searches"),
        (["explain", "local/dp2", "--report", "page.html"], "explanation"),
    ],
)
def test_commands_write_what_they_know_as_one_page(arguments: list[str], part: str, folder: Path, capsys) -> None:
    assert run(arguments) == 0
    assert [path.name for path in folder.iterdir()] == ["page.html"]
    text = (folder / "page.html").read_text()
    document = json.loads(text.split('<script id="document" type="application/json">')[1].split("</script>")[0])
    assert document[part]
    assert document["facts"][0][0] == "step time"


def test_help_of_simulate_names_the_page(capsys) -> None:
    assert run(["simulate", "--help"]) == 0
    assert ".html" in capsys.readouterr().out
