"""Under what something was measured: versions and the machine, as the head of a file of rows says it."""

import os
import platform
import time
from importlib.metadata import version


def circumstances() -> dict[str, str]:
    """Return the versions and the machine."""
    return {
        "meshwise": version("meshwise"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def today() -> str:
    """Return the date in UTC, as ``2026-11-21``."""
    return time.strftime("%Y-%m-%d", time.gmtime())
