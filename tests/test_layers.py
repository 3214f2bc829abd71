"""Imports point only down, nothing cycles, the core needs no torch, and tests lie where modules lie."""

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "simulator": set(),
    "strategies": {"simulator"},
    "executor": {"simulator", "strategies"},
    "reports": {"simulator", "strategies"},
    "scenarios": {"simulator", "strategies", "executor", "reports"},
}
FILES = sorted(path for room in ALLOWED for path in (ROOT / room).rglob("*.py"))


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
    return {name.removeprefix("meshwise.") for name in names}


def test_the_five_rooms_exist() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    met = {name.split(".")[0] for name in imported(path)} & set(ALLOWED)
    assert met - {room} <= ALLOWED[room]


def modules() -> nx.DiGraph:
    """Return which modules import which at their top."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = nx.DiGraph()
    for name, path in names.items():
        for target in imported(path, top_level_only=True):
            if target in names and target != name and not name.startswith(target + "."):
                graph.add_edge(name, target)
    return graph


def test_no_module_cycles() -> None:
    assert list(nx.simple_cycles(modules())) == []


def test_the_executor_never_imports_lowering() -> None:
    # two back ends of one plan, which share facts of the plan alone; what compares them stands above both, in scenarios
    for path in FILES:
        if path.is_relative_to(ROOT / "executor"):
            assert not any(name.startswith("strategies.lowering") for name in imported(path)), path
    graph = modules()
    loaded = set().union(*(nx.descendants(graph, name) for name in graph if name.startswith("executor")))
    assert not any(name.startswith("strategies.lowering") for name in loaded)


REGISTRIES = {
    "executor/capture/rules",
    "scenarios/commands",
    "scenarios/interchange",
    "simulator/models",
    "strategies/schedules",
    "strategies/search/algorithms",
}
"""Rooms whose files are members of one registry: each has as many as there are members."""


def rooms() -> nx.DiGraph:
    """Return which folders import which at their top, the modules of each room with their own imports beside."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    homes = {name: path.parent.relative_to(ROOT).as_posix() for name, path in modules.items()}
    graph = nx.DiGraph()
    for name, path in modules.items():
        inside = graph.nodes.get(homes[name], {}).get("inside") or nx.DiGraph()
        graph.add_node(homes[name], inside=inside)
        if path.name in ("__init__.py", "__main__.py"):
            continue
        inside.add_node(name)
        for target in imported(path, top_level_only=True) & set(modules):
            if homes[target] == homes[name]:
                inside.add_edge(name, target)
            else:
                graph.add_edge(homes[name], homes[target])
    return graph


def test_rooms_do_not_import_each_other_in_circles() -> None:
    assert [circle for circle in nx.strongly_connected_components(rooms()) if len(circle) > 1] == []


def test_a_room_has_few_files_and_floors() -> None:
    for room, inside in rooms().nodes(data="inside"):
        assert inside.number_of_nodes() <= (30 if room in REGISTRIES else 15), room
        assert nx.dag_longest_path_length(inside) + 1 <= 7, (room, nx.dag_longest_path(inside))


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if "executor" not in p.parts and (p.parent / "__init__.py").exists()],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_only_the_executor_and_the_policy_import_torch(path: Path) -> None:
    # and modules of users, as those of scenarios/operators, which no package imports; a policy only where it runs
    names = imported(path, top_level_only=path.name == "reinforcement.py") if path.name != "policy.py" else set()
    assert "torch" not in {name.split(".")[0] for name in names}
    assert "strategies.search.algorithms.policy" not in imported(path, top_level_only=True)


def test_the_core_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import meshwise, meshwise.scenarios, meshwise.simulator.engine, meshwise.strategies.lowering\n"
        "import meshwise.strategies.cost_model, meshwise.strategies.search.driver\n"
        "import meshwise.reports.pictures.timeline, meshwise.reports.traces.chrome\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


MIRRORED = 0.8
"""The share of modules that have a test file where they lie: ``strategies/plan/mesh.py`` has
``tests/strategies/plan/test_mesh.py``, and more beside it, as ``test_mesh_TOPIC.py``."""


def test_modules_have_their_tests_where_they_lie() -> None:
    modules = [path.relative_to(ROOT) for path in FILES if path.name != "__init__.py"]
    without = [path for path in modules if not (ROOT / "tests" / path.parent / f"test_{path.name}").is_file()]
    assert len(without) <= (1 - MIRRORED) * len(modules), "\n".join(path.as_posix() for path in without)


def test_a_test_file_lies_in_the_folder_of_modules_or_above() -> None:
    """What is moved or renamed takes its tests along: no folder of tests is left of one that is gone."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        if folder.parts and folder.parts[0] in ALLOWED:
            assert (ROOT / folder).is_dir(), folder
