"""When and with what something is measured, for the heads of rows."""

import os
import platform
import time
from importlib.metadata import version


def describe_circumstances() -> dict[str, str]:
    """Return the versions and the machine that something is measured with."""
    return {
        "meshwise": version("meshwise"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def format_today() -> str:
    """Return the date in UTC, as ``2026-11-21``."""
    return time.strftime("%Y-%m-%d", time.gmtime())
