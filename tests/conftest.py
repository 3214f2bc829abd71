"""What all tests share: one thread a process, long runs of properties, and ranks that start fast."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and NumPy start as many as there are cores, in each worker

settings.register_profile("long", max_examples=1000, deadline=None, derandomize=False)


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
        patch.setattr("executor.launcher._spawn", spawn)
        yield
