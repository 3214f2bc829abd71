"""Every parser of data from outside: how it reads one input, and the error that it may raise."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.reader import parse_document

from . import corpus
from .mutation import Mutator
from .tree import Tree, text_of, tree_of

Read = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Parser:
    """A parser of outside data.

    Parameters
    ----------
    reader
        Makes, in a folder of its own, the function that reads one input.
    mutator
        Makes the inputs.
    errors
        What reading may raise; anything else is a failure.
    """

    reader: Callable[[Path], Read]
    mutator: Callable[[], Mutator]
    errors: tuple[type[Exception], ...] = (ScenarioError,)


def _files(texts: Callable[[], tuple[str, ...]]) -> Mutator:
    """Return inputs that are one document of YAML or JSON each."""
    return Mutator(texts(), corpus.trees(texts()))


def _lines(rows: tuple[dict[str, object], ...]) -> Mutator:
    """Return inputs that are one JSON object a line."""
    lines = tuple(map(json.dumps, rows))
    return Mutator(
        ("\n".join(lines) + "\n", *lines), [[tree_of(row)] for row in rows] + [list(map(tree_of, rows))], _as_lines
    )


def _as_lines(tree: Tree) -> str:
    return "".join(text_of(item) + "\n" for item in tree)


def _scenario(folder: Path) -> Read:
    from meshwise.scenarios.loader import read_scenario

    (folder / "cluster.yaml").write_text(corpus.clusters()[0])
    (folder / "graph.json").write_text(corpus.graphs()[0])
    (folder / "config.json").write_text(json.dumps(corpus.CONFIGS[1]))
    return lambda content: read_scenario(parse_document(content, str(folder / "s.yaml")))


def _plan(folder: Path) -> Read:
    from meshwise.scenarios.loader import read_scenario

    scenario = parse_document(corpus.PLANNED.encode(), "s.yaml")
    return lambda content: read_scenario(scenario, parse_document(content, "plan.json"))


def _cluster(folder: Path) -> Read:
    from meshwise.scenarios.inputs.cluster_file import build_cluster

    return lambda content: build_cluster(parse_document(content, "c.yaml"))


def _graph(folder: Path) -> Read:
    from meshwise.scenarios.inputs.graph_file import build_graph

    return lambda content: build_graph(parse_document(content, "g.json")).graph(1, "bf16")


def _config(folder: Path) -> Read:
    from meshwise.scenarios.inputs.named_files import read_model
    from meshwise.simulator.models.model import build

    def read(content: bytes) -> object:
        model = read_model(content, "config.json")
        try:
            return build(model, 64, "bf16")
        except ValueError as error:  # as a scenario says it
            raise ScenarioError((Fault("config.json", 0, 0, "sequence", str(error)),)) from None

    return read


def _rows(folder: Path) -> Read:
    from meshwise.scenarios.published.runs import parse_runs

    return lambda content: parse_runs(content.splitlines(keepends=True), "rows.jsonl")


def _kernels(folder: Path) -> Read:
    from meshwise.simulator.calibration.kernel_rows import read_rows

    return lambda content: read_rows(content.splitlines(keepends=True))


def _collectives(folder: Path) -> Read:
    from meshwise.simulator.calibration.collective_rows import read_rows

    return lambda content: read_rows(content.decode("utf-8", "replace").splitlines())


def _machine(folder: Path) -> Read:
    from meshwise.executor.calibration.device_cluster import build_cluster

    return lambda content: build_cluster(content.splitlines())


def _schedule(folder: Path) -> Read:
    from meshwise.strategies.schedules.schedule import Schedule, find_rule, is_text

    def read(content: bytes) -> object:
        text = content.decode("utf-8", "replace")
        return (Schedule.parse(text), find_rule(text)) if is_text(text) else find_rule(text)

    return read


def _question(folder: Path) -> Read:
    from meshwise.scenarios.explanation import parse_question

    return lambda content: parse_question(content.decode("utf-8", "surrogateescape"))


def _quantity(folder: Path) -> Read:
    from meshwise.simulator.units import Dimension
    from meshwise.simulator.units import parse as quantity

    def read(content: bytes) -> object:
        text = content.decode("utf-8", "surrogateescape")
        return quantity(text, list(Dimension)[len(text) % len(Dimension)])

    return read


def _journal(folder: Path) -> Read:
    from meshwise.scenarios.search_journal import read_trials

    return lambda content: read_trials(content.splitlines(keepends=True), "journal.jsonl", _HEAD)


_HEAD: dict[str, object] = {
    "journal": "meshwise search",
    "version": 1,
    "algorithm": "mcmc",
    "options": {"seed": 0},
    "problem": "0" * 64,
}
_TRIALS: tuple[dict[str, object], ...] = tuple(
    {"plan": f"{index:064x}", "step_time": time, "peak_memory": 8e10, "fits": time is not None, "elapsed": 3.1}
    for index, time in enumerate((16.8, None, 12))
)


def _manifest(folder: Path) -> Read:
    from meshwise.executor.training.checkpoint import read_manifest

    return lambda content: read_manifest(folder, content)


_MANIFEST = {
    "version": 1, "step": 20, "seed": 0,
    "tensors": {"a": ["float32", [4, 8]], "b": ["bfloat16", [8]]},
    "files": {"rank-0.bin": {"bytes": 144, "sha256": "0" * 64,
                             "pieces": [["a", [0, 0], [4, 8], 0], ["b", [0], [8], 128]]}},
}  # fmt: skip


def _texts(*texts: str) -> Callable[[], Mutator]:
    return partial(Mutator, texts)


PARSERS: dict[str, Parser] = {
    "yaml": Parser(lambda _: partial(parse_document, file="x.yaml"), partial(_files, corpus.scenarios)),
    "scenario": Parser(_scenario, partial(_files, corpus.scenarios)),
    "plan": Parser(_plan, partial(_files, corpus.plans)),
    "cluster": Parser(_cluster, partial(_files, corpus.clusters)),
    "graph": Parser(_graph, partial(_files, corpus.graphs)),
    "hf_config": Parser(_config, partial(_files, lambda: tuple(map(json.dumps, corpus.CONFIGS)))),
    "rows": Parser(_rows, partial(_lines, corpus.ROWS)),
    "kernels": Parser(_kernels, partial(_lines, corpus.KERNELS), (ValueError,)),
    "collectives": Parser(_collectives, partial(_lines, corpus.COLLECTIVES), ()),
    "machine": Parser(_machine, partial(_lines, corpus.MACHINE), (ValueError,)),
    "schedule": Parser(_schedule, _texts(*corpus.SCHEDULES), (ValueError,)),
    "question": Parser(_question, _texts(*corpus.QUESTIONS)),
    "quantity": Parser(_quantity, _texts(*corpus.QUANTITIES), (ValueError,)),
    "journal": Parser(_journal, partial(_lines, (_HEAD, *_TRIALS))),
    "manifest": Parser(_manifest, lambda: Mutator([json.dumps(_MANIFEST)], [tree_of(_MANIFEST)]), (ValueError,)),
}
"""The parsers by name."""
