"""Imports point only down, nothing cycles, the core needs no torch, and tests lie where modules lie."""

import ast
import subprocess
import sys
from functools import cache
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


BRANCHES = {"costs", "rank_classes", "tasks"}
"""Packages of lowering that know nothing of each other: its own modules bring them together."""


@pytest.mark.parametrize("branch", sorted(BRANCHES))
def test_branches_of_lowering_meet_only_above_them(branch: str) -> None:
    others = tuple(f"strategies.lowering.{other}" for other in sorted(BRANCHES - {branch}))
    above = {f"strategies.lowering.{path.stem}" for path in (ROOT / "strategies/lowering").glob("*.py")}
    paths = [path for path in FILES if path.is_relative_to(ROOT / "strategies/lowering" / branch)]
    assert paths
    for path in paths:
        met = imported(path)
        assert not [name for name in met if f"{name}.".startswith(tuple(f"{other}." for other in others))], path
        assert not met & above, path


STRATEGIES = [path for path in FILES if path.is_relative_to(ROOT / "strategies")]
MUTABLE_CALLS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "WeakKeyDictionary"}
CHANGES = {"append", "add", "extend", "insert", "setdefault", "update", "pop", "popitem", "clear", "remove", "discard"}
"""Methods that change a dict, a list or a set."""


def find_identities(tree: ast.Module) -> list[int]:
    """Return the lines that ask for the id of an object: it may be that of another one later."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "id"]


def find_module_caches(tree: ast.Module) -> list[int]:
    """Return the lines of functions that change a dict, list or set of their module."""
    names = set()
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if targets and _is_mutable(node.value):
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    )
    return sorted(
        {node.lineno for function in functions for node in ast.walk(function) if _changed_names(node) & names}
    )


def _is_mutable(value: ast.expr | None) -> bool:
    """Return whether an expression makes a dict, a list or a set."""
    if isinstance(value, ast.Call):
        made = value.func.value if isinstance(value.func, ast.Subscript) else value.func  # dict[str, int]()
        return (made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")) in MUTABLE_CALLS
    kinds = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return isinstance(value, kinds)


def _changed_names(node: ast.AST) -> set[str]:
    """Return the names of what a statement or a call changes in place."""
    changed: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        changed = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.AugAssign):
        changed = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        changed = [node.func.value]
    return {each.id for each in changed if isinstance(each, ast.Name)}


def find_hand_kept_caches(tree: ast.Module) -> list[int]:
    """Return the lines of ``if key not in self.results: self.results[key] = ...``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        for key, results in _list_missing(node.test)
        if any(_fills(statement, key, results) for row in node.body for statement in ast.walk(row))
    ]


def _list_missing(test: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the pairs of a key and an attribute of an object of which a test says that the key is not in it."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    comparisons = [part for part in parts if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.NotIn)]
    return [(part.left, part.comparators[0]) for part in comparisons if isinstance(part.comparators[0], ast.Attribute)]


def _fills(statement: ast.AST, key: ast.expr, results: ast.expr) -> bool:
    """Return whether a statement sets ``results[key]``."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    entries = [target for target in targets if isinstance(target, ast.Subscript)]
    return any(
        ast.unparse(entry.value) == ast.unparse(results) and ast.unparse(entry.slice) == ast.unparse(key)
        for entry in entries
    )


def test_caches_are_found_and_other_dicts_are_not() -> None:
    text = """
KNOWN: dict[str, int] = {}
TABLE = {"a": 1}
def size(self, name):
    if name not in self._sizes:
        self._sizes[name] = len(name)
    if name not in self.names:
        self._sizes[name] = 0
    KNOWN.setdefault(name, 1)
    KNOWN[name] = TABLE[name]
    row = {}
    row[name] = id(name)
    return self.id(name)
"""
    tree = ast.parse(text)
    assert (find_identities(tree), find_module_caches(tree), find_hand_kept_caches(tree)) == ([12], [9, 10], [5])


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_results_are_kept_by_memoised_methods_alone(path: Path) -> None:
    """What is worked out once is kept by `meshwise.simulator.memo`, by frozen keys: never by hand, or by identity."""
    tree = ast.parse(path.read_text("utf-8"))
    assert find_identities(tree) == []
    assert find_module_caches(tree) == []
    assert find_hand_kept_caches(tree) == []


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


TESTS = sorted((ROOT / "tests").rglob("*.py"))


def find_module(path: Path, node: ast.ImportFrom) -> Path | None:
    """Return the file or folder from which a file of tests imports, or ``None`` where it is of no room and no test."""
    names = (node.module or "").split(".")
    if node.level:
        home = path.parents[node.level - 1]
        found = home.joinpath(*names) if node.module else home
    elif names[0] == "meshwise":
        found = ROOT.joinpath(*names[1:]) if names[1:] else ROOT / "scenarios/api"
    else:
        return None
    return found if found.is_dir() else found.with_suffix(".py")


@cache
def list_bound(path: Path) -> set[str] | None:
    """Return the names that a module or folder has: ``None`` where it makes them when asked."""
    if path.is_dir():
        inside = {child.stem for child in path.iterdir() if child.suffix == ".py" or child.is_dir()}
        init = path / "__init__.py"
        bound = list_bound(init) if init.is_file() else set()
        return None if bound is None else bound | inside
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return None if "__getattr__" in names else names


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_tests_import_is_there(path: Path) -> None:
    """A file of tests that cannot be imported is left out as one that needs torch is: nobody would see it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        module = find_module(path, node) if isinstance(node, ast.ImportFrom) else None
        if isinstance(node, ast.ImportFrom) and module is not None:
            assert module.exists(), ast.unparse(node)
            bound = list_bound(module)
            assert bound is None or {alias.name for alias in node.names} - {"*"} <= bound, ast.unparse(node)
