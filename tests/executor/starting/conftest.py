import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_frozen() -> Iterator[None]:
    """Have a start look for tensors among new objects alone, which is quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
