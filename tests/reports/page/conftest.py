"""Reports of small and large plans, and what a page says of them."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from meshwise import load
from meshwise.reports.page.report import Report
from meshwise.simulator.spans import Spans
from meshwise.strategies.explanation.critical_path import critical_path
from meshwise.strategies.lowering.lower import lower

HOSTILE = "</script><img src=x onerror='window.hacked=1'><script>window.hacked=1</script> & \"quoted\" <b>"


def report_of(name: str, **more: Any) -> Report:
    scenario = load(name)
    result = scenario.simulate()
    path = critical_path(lower(scenario.problem, result.plan))
    cluster = scenario.problem.cluster
    return Report(scenario.name, result.to_json(), result.timeline, result.plan, cluster, path=path, **more)


@pytest.fixture(scope="session")
def small() -> Report:
    """A plan of 8 ranks in 4 kinds: data 2, tensor 2, pipeline 2."""
    return report_of("local/dp2-tp2-pp2")


@pytest.fixture(scope="session")
def large() -> Report:
    """A plan of 16,384 ranks."""
    return report_of("llama3-405b-16384-1f1b")


@pytest.fixture(scope="session")
def hostile(small: Report) -> Report:
    """The small plan with a measured step, in which every name from outside is markup."""
    columns = dataclasses.replace(small.timeline.columns, names=(HOSTILE,) * len(small.timeline.columns.names))
    timeline = dataclasses.replace(small.timeline, spans=Spans(lambda: columns))
    stages = tuple(dataclasses.replace(stage, blocks=(HOSTILE,)) for stage in small.plan.stages)
    result = {**small.result, "assumptions": (HOSTILE,)}
    plan = dataclasses.replace(small.plan, stages=stages)
    return dataclasses.replace(small, title=HOSTILE, timeline=timeline, plan=plan, result=result, measured=timeline)


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    def script(self, name: str) -> str:
        index = next(i for i, (tag, attrs) in enumerate(self.scripts) if attrs.get("id") == name)
        return [data for tag, data in self.texts if tag == "script" and data.strip()][index]

    @property
    def scripts(self) -> list[tuple[str, dict[str, str | None]]]:
        return [found for found in self.tags if found[0] == "script"]


@pytest.fixture(scope="session")
def read() -> Callable[[str], Page]:
    return Page


@pytest.fixture(scope="session")
def unpack() -> Callable[[str], tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]]:
    """Return what reads a page's document, and what reads a column of it."""

    def both(text: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
        page = Page(text)
        data = zlib.decompress(base64.b64decode(page.script("columns")))

        def column(where: dict[str, Any]) -> Any:
            return np.frombuffer(data, f"<{where['type']}", where["count"], where["at"])

        return json.loads(page.script("document")), column

    return both
