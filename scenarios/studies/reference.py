"""The reference of the Python interface as pages of the documentation, from the docstrings of public names.

Run ``python -m meshwise.scenarios.studies.reference docs/reference`` to write them. `PAGES` lists pages, modules and
names. Modules are parsed, not imported, so that the pages are the same in every version of Python and without torch.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CONTENTS = "README.md"

Names = tuple[str, ...]
ALL: Names = ()
"""Stands for every public class and function, and every documented constant, of a module."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the reference; ``modules`` are pairs of a module and its names, `ALL` for all public names."""

    file: str
    title: str
    lead: str
    modules: tuple[tuple[str, Names], ...]


PAGES = (
    Page(
        "scenarios.md",
        "Scenarios and results",
        "What `from meshwise import load` gives, and what its methods return.",
        (
            ("meshwise.scenarios.loader", ("load",)),
            ("meshwise.scenarios.scenario", ("Scenario", "SearchSettings", "Measured")),
            ("meshwise.scenarios.simulation", ("Simulation", "StageMemory")),
            ("meshwise.scenarios.files.errors", ("Fault", "ScenarioError")),
            ("meshwise.scenarios.files.library", ALL),
            ("meshwise.scenarios.inputs.cluster_file", ("load_cluster", "write_cluster")),
            ("meshwise.scenarios.inputs.graph_file", ("load_graph", "dump_graph")),
            ("meshwise.scenarios.oracle_check", ("Check", "RankCheck", "MemoryLine", "TrafficLine")),
            ("meshwise.scenarios.calibration.calibrate", ("calibrate",)),
            (
                "meshwise.scenarios.intervals",
                ("step_time_interval", "peak_memory_interval", "memory_margin"),
            ),
        ),
    ),
    Page(
        "search.md",
        "Search",
        "The driver of every search, its result, the space, and the algorithms with their options.",
        (
            (
                "meshwise.strategies.search.driver",
                ("search", "SearchResult", "Progress", "Proof", "SearchAlgorithm", "Journal", "Certificate"),
            ),
            ("meshwise.strategies.search.space", ("Space", "layouts", "neighbours")),
            ("meshwise.strategies.search.fan_out", ("processes",)),
            ("meshwise.strategies.search.algorithms.auto", ("Auto",)),
            ("meshwise.strategies.search.algorithms.best_first", ("BestFirst",)),
            ("meshwise.strategies.search.algorithms.exhaustive", ("Exhaustive", "BreadthFirst")),
            ("meshwise.strategies.search.algorithms.beam", ("Beam",)),
            ("meshwise.strategies.search.algorithms.mcmc", ("MCMC",)),
            ("meshwise.strategies.search.algorithms.mcts", ("MCTS",)),
            ("meshwise.strategies.search.algorithms.reinforcement", ("Reinforcement",)),
            ("meshwise.strategies.search.algorithms.random", ("RandomSearch",)),
            ("meshwise.strategies.search.algorithms.expert", ("Expert",)),
            ("meshwise.strategies.search.algorithms.bottleneck", ("Bottleneck",)),
            ("meshwise.strategies.search.algorithms.stages", ("PipelineDP", "LayerDP", "InterStageMILP")),
            (
                "meshwise.strategies.search.algorithms.operators",
                ("Frontier", "IntegerProgramming", "DynamicProgramming", "RecursiveProgramming", "ShardingPropagation"),
            ),
        ),
    ),
    Page(
        "plans.md",
        "Plans",
        "A problem, a plan and its parts, and how a plan becomes a program.",
        (
            ("meshwise.strategies.plan.problem", ("Problem", "Training")),
            ("meshwise.strategies.plan.plan", ("Plan", "Stage")),
            ("meshwise.strategies.plan.layout", ("Layout",)),
            ("meshwise.strategies.plan.mesh", ("Axis", "Mesh")),
            (
                "meshwise.strategies.plan.sharding",
                ("ShardingSpec", "OperatorSharding", "Redistribution", "redistribute"),
            ),
            ("meshwise.strategies.schedules.schedule", ("ActionKind", "Action", "Schedule", "schedule")),
            (
                "meshwise.strategies.plan.recomputation",
                ("Recompute", "FirstLayers", "SomeOperators", "PerStage", "recomputation"),
            ),
            ("meshwise.strategies.plan.offloading", ("StepPlace", "Offloading", "offloading")),
            ("meshwise.strategies.evaluation", ("Evaluation", "Trial")),
            ("meshwise.strategies.cost_model", ALL),
            ("meshwise.strategies.lowering.lower", ("lower",)),
        ),
    ),
    Page(
        "simulator.md",
        "Simulator",
        "The machine, the network, the program that is run, and what comes of it.",
        (
            ("meshwise.simulator.engine", ("simulate", "step_time", "step_ticks")),
            ("meshwise.simulator.engine.bound", ("step_bound",)),
            (
                "meshwise.simulator.program",
                (
                    "TaskKind",
                    "StreamKind",
                    "Category",
                    "Stream",
                    "RankClass",
                    "HostClass",
                    "Change",
                    "Piece",
                    "Work",
                    "Flow",
                    "LinkClass",
                    "Background",
                    "MemoryChange",
                    "Steps",
                    "Program",
                    "Task",
                    "program_of",
                    "ragged",
                ),
            ),
            ("meshwise.simulator.timeline", ("Timeline", "LinkUse")),
            ("meshwise.simulator.spans", ("Span",)),
            ("meshwise.simulator.memory", ("MemoryProfile", "sweep")),
            ("meshwise.simulator.machine.cluster", ALL),
            ("meshwise.simulator.machine.accelerator", ("Accelerator",)),
            (
                "meshwise.simulator.machine.kernels",
                (
                    "Matmul",
                    "MatmulModel",
                    "compute_time",
                    "soft_roofline",
                    "AttentionShape",
                    "AttentionModel",
                    "attention_compute_time",
                ),
            ),
            (
                "meshwise.simulator.machine.compute",
                ("Pass", "matmul_time", "attention_time", "operator_time", "optimizer_time"),
            ),
            ("meshwise.simulator.machine.host", ALL),
            ("meshwise.simulator.machine.topology", ALL),
            ("meshwise.simulator.collective", ALL),
            ("meshwise.simulator.collectives.choose", ("phases", "algorithms", "idle_time", "measured_time", "choose")),
            ("meshwise.simulator.operator_graph", ("OperatorKind", "Tensor", "Operator", "Block", "OperatorGraph")),
            ("meshwise.simulator.models.model", ("Model", "build")),
            ("meshwise.simulator.models.transformer", ("Transformer",)),
            ("meshwise.simulator.models.hugging_face", ("spec_from_config",)),
            ("meshwise.simulator.catalog", ("accelerator_names", "accelerator", "cluster_names", "cluster", "sources")),
            ("meshwise.simulator.units", ("Dimension", "parse", "format_time", "format_size", "format_bandwidth")),
            ("meshwise.simulator.reliability.long_run", ("LongRun",)),
            (
                "meshwise.simulator.reliability.goodput",
                ("Goodput", "goodput", "young_interval", "daly_interval", "best_interval"),
            ),
        ),
    ),
    Page(
        "executor.md",
        "Executor",
        "Running a plan on torch, measuring a machine, and capturing a module. Needs the extra `exec`.",
        (
            ("meshwise.executor.launch.run", ("Run", "execute")),
            ("meshwise.executor.options", ("RunOptions", "LearningRate")),
            ("meshwise.executor.check.verification", ("Verification", "VerificationError")),
            ("meshwise.executor.capture.capture", ("capture",)),
            ("meshwise.executor.capture.captured", ("NamedDims", "CaptureError", "Captured")),
            ("meshwise.executor.launch.several_hosts", ("Hosts", "prepare", "read_run")),
        ),
    ),
    Page(
        "reports.md",
        "Reports",
        "Pictures, traces, tables and pages from results.",
        (
            ("meshwise.reports.pictures.timeline", ("draw_timeline", "draw_comparison")),
            ("meshwise.reports.pictures.memory", ("draw_memory",)),
            ("meshwise.reports.page.report", ("Report",)),
            ("meshwise.reports.page.html", ("html",)),
            ("meshwise.reports.traces.chrome", ("write_trace",)),
            ("meshwise.reports.traces.perfetto", ("write_perfetto",)),
            ("meshwise.reports.pictures.search", ("draw_search", "trials_table")),
            ("meshwise.reports.difference", ("Difference", "DifferenceRow", "difference")),
            ("meshwise.reports.pictures.accuracy", ("AccuracyRow", "draw_accuracy")),
            ("meshwise.reports.pictures.goodput", ("draw_goodput",)),
            ("meshwise.reports.pictures.pareto", ("draw_fronts",)),
            ("meshwise.reports.pictures.sharded_graph", ("draw_sharded_graph",)),
            ("meshwise.reports.document", ("Section", "to_markdown")),
        ),
    ),
)


Definition = ast.ClassDef | ast.FunctionDef
WIDTH = 100
"""Longest signature, in characters, that stays on one line."""
_ITEMS = ("Parameters", "Attributes", "Raises", "Returns", "Yields")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a docstring; the first one has no title."""

    title: str
    lines: tuple[str, ...]


def write_pages(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in build_pages().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def build_pages() -> dict[str, str]:
    """Return the text of every page by the name of its file."""
    return {CONTENTS: _format_contents(), **{page.file: _format_page(page) for page in PAGES}}


def _format_contents() -> str:
    lines = [
        "# Python reference",
        "",
        "Written by `python -m meshwise.scenarios.studies.reference docs/reference` from docstrings.",
        "",
    ]
    lines += [f"- [{page.title}]({page.file}): {page.lead}" for page in PAGES]
    return "\n".join(lines) + "\n"


def _format_page(page: Page) -> str:
    lines = [f"# {page.title}", "", page.lead, ""]
    for module, names in page.modules:
        tree = _parse_module(module)
        head = _split_sections(ast.get_docstring(tree) or "")[0]
        lines += [f"## {module}", "", *_format_prose(head.lines), ""]
        definitions = dict(_list_definitions(tree))
        for name in names or tuple(definitions):
            if name not in definitions:
                raise ValueError(f"{module} has no public {name}")
            lines += [*_format_entry(name, definitions[name]), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _parse_module(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).read_text("utf-8"))


def _list_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition | tuple[str, str]]]:
    """Yield the public classes, functions and documented constants of a module, each with its name."""
    for node, next_node in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            text = _string_of(next_node)
            if isinstance(target, ast.Name) and text and not target.id.startswith("_"):
                yield target.id, (target.id, text)


def _string_of(node: ast.stmt | None) -> str:
    """Return the text of a statement that is only a string; empty for other statements."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _format_entry(name: str, definition: Definition | tuple[str, str]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if isinstance(definition, tuple):
        yield from _format_docstring(definition[1])
        return
    yield from _fence_text(_format_signature(definition))
    yield from _format_docstring(ast.get_docstring(definition) or "")
    if isinstance(definition, ast.ClassDef):
        for member in definition.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                yield f"#### {name}.{member.name}"
                yield ""
                yield from _fence_text(_format_signature(member))
                yield from _format_docstring(ast.get_docstring(member) or "")


def _fence_text(text: str) -> tuple[str, ...]:
    return "```text", text, "```", ""


def _format_signature(node: Definition) -> str:
    """Return the signature of a class or function, or the values of an enumeration."""
    if isinstance(node, ast.FunctionDef):
        result = f" -> {_format_type(node.returns)}" if node.returns else ""
        if any(ast.unparse(child) in ("property", "cached_property") for child in node.decorator_list):
            return f"{node.name}{result}"
        return _format_call(node.name, _list_arguments(node.args), result)
    bases = [ast.unparse(base) for base in node.bases]
    if "StrEnum" in bases:
        values = [ast.unparse(child.value) for child in node.body if isinstance(child, ast.Assign)]
        return _format_call(node.name, values, "")
    fields = [_format_field(child) for child in node.body if isinstance(child, ast.AnnAssign) and _is_field(child)]
    constructor = next(
        (child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"), None
    )
    return _format_call(node.name, fields if constructor is None else _list_arguments(constructor.args), "")


def _is_field(node: ast.AnnAssign) -> bool:
    return not ast.unparse(node.annotation).startswith("ClassVar") and not ast.unparse(node.target).startswith("_")


def _format_field(node: ast.AnnAssign) -> str:
    value = f" = {ast.unparse(node.value)}" if node.value is not None else ""
    return f"{ast.unparse(node.target)}: {_format_type(node.annotation)}{value}"


def _list_arguments(arguments: ast.arguments) -> list[str]:
    """Return the parameters of a function as text, without self and cls."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_format_argument(argument, value) for argument, value in zip(positional, defaults, strict=True)]
    words = [word for word, argument in zip(words, positional, strict=True) if argument.arg not in ("self", "cls")]
    if arguments.vararg is not None:
        words.append(f"*{_format_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        words.append("*")
    keyword_pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    words += [_format_argument(argument, value) for argument, value in keyword_pairs]
    return words + ([f"**{_format_argument(arguments.kwarg, None)}"] if arguments.kwarg is not None else [])


def _format_argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = _format_type(argument.annotation) if argument.annotation else ""
    value = ast.unparse(default) if default is not None else ""
    return argument.arg + (f": {kind}" if kind else "") + (f" = {value}" if value else "")


def _format_type(annotation: ast.expr) -> str:
    """Return a type annotation as written, without the quotes of a forward reference."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _format_call(name: str, words: Sequence[str], result: str) -> str:
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def _format_docstring(text: str) -> Iterator[str]:
    """Yield the lines of a NumPy docstring as Markdown."""
    for section in _split_sections(text):
        if section.title:
            yield f"*{section.title}*"
            yield ""
        if section.title in _ITEMS:
            yield from _format_items(section.lines)
        else:
            yield from _format_prose(section.lines)
        yield ""


def _split_sections(text: str) -> list[Section]:
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in text.strip().splitlines():
        if re.fullmatch(r"-{3,}", line.strip()) and sections[-1][1]:
            sections.append((sections[-1][1].pop().strip(), []))
        else:
            sections[-1][1].append(line)
    return [Section(title, tuple(lines)) for title, lines in sections]


def _format_items(lines: Sequence[str]) -> Iterator[str]:
    """Yield the entries of a section as a Markdown list: names start a line, their descriptions are indented."""
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        if line and not line.startswith(" "):
            entries.append((line.strip(), []))
        elif line.strip() and entries:
            entries[-1][1].append(line.strip())
    for name, descriptions in entries:
        yield f"- `{name}`" + (f": {_format_line(' '.join(descriptions))}" if descriptions else "")


def _format_prose(lines: Sequence[str]) -> Iterator[str]:
    """Yield running text, with doctests as code blocks."""
    example: list[str] = []
    for line in (*lines, ""):
        if line.startswith(">>>") or (example and line.strip()):
            example.append(line)
            continue
        if example:
            yield from ("", "```pycon", *example, "```", "")
            example = []
        yield _format_line(line)


def _format_line(line: str) -> str:
    """Return a line with its references to literature in Markdown."""
    line = re.sub(r"^\.\. \[(\w+)\] ", r"- [\1] ", line.strip() if line.startswith("..") else line)
    return re.sub(r"\[(\w+)\]_", r"[\1]", line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m meshwise.scenarios.studies.reference")
    parser.add_argument("folder", type=Path)
    write_pages(parser.parse_args().folder)
