"""The one door: what `import meshwise` offers, how soon, and that nothing else is installed."""

import subprocess
import sys
from importlib.metadata import packages_distributions, version

import meshwise

NAMES = [
    "ALGORITHMS",
    "Accelerator",
    "Cluster",
    "Fault",
    "Host",
    "Layout",
    "Link",
    "Mesh",
    "Node",
    "OperatorGraph",
    "Plan",
    "Problem",
    "Run",
    "SCHEDULES",
    "Scenario",
    "ScenarioError",
    "Schedule",
    "SearchResult",
    "Simulation",
    "Space",
    "Timeline",
    "Training",
    "Transformer",
    "accelerator",
    "build",
    "capture",
    "cluster",
    "execute",
    "load",
    "lower",
    "parallelize",
    "read_tokens",
    "search",
    "simulate",
]


def test_the_door_has_these_names_and_no_others() -> None:
    assert sorted(meshwise.__all__) == NAMES
    assert set(NAMES) <= set(dir(meshwise))
    assert all(
        getattr(meshwise, name) is not None
        for name in NAMES
        if name not in ("capture", "execute", "parallelize", "read_tokens")
    )


def test_it_has_the_version_that_is_installed() -> None:
    assert meshwise.__version__ == version("meshwise")


def test_importing_it_loads_nothing_heavy() -> None:
    heavy = ("torch", "pandas", "matplotlib", "numpy", "simpy", "pydantic")
    code = f"import sys, meshwise; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_torch_a_name_that_needs_it_says_so() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import meshwise\n"
        "try:\n    meshwise.capture\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "meshwise.capture needs torch: pip install 'meshwise[exec]'\n"


def test_a_scenario_is_simulated_and_searched_through_it() -> None:
    scenario = meshwise.load("local/dp2")
    found = scenario.search(budget=2)
    assert isinstance(found, meshwise.SearchResult) and found.best is not None
    assert isinstance(found.best.plan, meshwise.Plan)
    assert isinstance(scenario.simulate(found.best.plan), meshwise.Simulation)


def test_nothing_but_meshwise_is_installed() -> None:
    ours = [name for name, owners in packages_distributions().items() if "meshwise" in owners]
    assert [name for name in ours if not name.startswith("__editable__")] in ([], ["meshwise"])
