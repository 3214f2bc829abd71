"""What all tests share: one thread a process, interrupts, which are slow, and ranks that start fast."""

import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from .durations import Durations, mark_long, mark_slow

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and NumPy start as many as there are cores, in each worker

if "PYTEST_XDIST_WORKER" not in os.environ and find_spec("torch"):
    from meshwise.executor.device import avoid_broken_tiles

    avoid_broken_tiles()  # workers inherit it

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell begin without
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
"""Settings with which no property fails because the machine has other work."""
settings.register_profile("usual", **UNTIMED)
settings.register_profile("long", max_examples=1000, derandomize=False, **UNTIMED)
settings.load_profile("usual")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures which tests are slow."""
    parser.addoption("--measure-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in the process that all workers report to."""
    if config.getoption("--measure-durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Durations())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what is slow to the second part of the whole suite, and what is too much of it to those who ask.

    Tests that are asked for by name run; all are measured.
    """
    if config.args_source is config.ArgsSource.TESTPATHS:
        mark_slow(items)
        if not config.getoption("--measure-durations"):
            mark_long(items)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[list[Any]]:
    """Yield where the one process that forks ranks is kept once a test needs it."""
    servers: list[Any] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked(request: pytest.FixtureRequest, fork_server: list[Any]) -> Iterator[None]:
    """Fork the ranks of runs, except in files that are marked ``fresh_ranks``."""
    if sys.platform != "linux" or request.node.get_closest_marker("fresh_ranks"):
        yield
        return
    from .forked_ranks import ForkServer

    def spawn(*arguments: Any) -> Any:
        if not fork_server:
            fork_server.append(ForkServer())
        return fork_server[0].spawn(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwise.executor.launch.launcher._spawn_process", spawn)
        yield
