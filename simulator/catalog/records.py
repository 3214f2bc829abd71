"""The catalog's data files: records by name, with the source of every figure.

A record with ``like`` inherits all fields that it does not state from the record of that name. A file
``calibration/NAME.json``, which `meshwise.simulator.calibration` writes, has figures of an accelerator's kernels that
take precedence over the record's own. ``sources`` maps the path of a figure, or of a group of figures, to a status and
a text; ``assumed`` lists figures that no document states. The entry with the longest path applies.

A link of a cluster may be a name instead: it then has the figures fitted to published collectives
(`meshwise.simulator.calibration`), with ``links`` times the bandwidth, and inside a node also their library.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwise.simulator.machine.topology import Link
from meshwise.simulator.units import Dimension, parse

STATUSES = ("read", "secondary", "derived", "chosen", "assumed")
"""How far a figure can be trusted.

``read`` in a document; ``secondary``: quoted in another document; ``derived``: arithmetic, a fit to
published measurements or the figure of a relative, as its source says; ``chosen``: an allowance
of the model; ``assumed``: no document states it.
"""

FITTED = ("launch", "matmul", "attention", "sustained", "kernel_bandwidth")
"""Figures of kernels, which a calibration replaces."""

_NOT_FIGURES = ("like", "sources", "assumed", "name")


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of the catalog.

    Parameters
    ----------
    figures
        The entry's fields as the file has them.
    origins
        Status and source of figures by path, such as ``host.memory``.
    """

    figures: dict[str, Any]
    origins: dict[str, tuple[str, str]]

    def origin(self, path: str) -> tuple[str, str] | None:
        """Return status and source of a figure, or ``None`` where it has none."""
        parts = path.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self.origins[prefix] for prefix in prefixes if prefix in self.origins), None)

    def paths(self) -> tuple[str, ...]:
        """Return the paths of all figures; names are no figures."""
        return tuple(_leaves("", {key: value for key, value in self.figures.items() if key not in _NOT_FIGURES}))


def _leaves(prefix: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [prefix]
    keys = (key for key in value if key != "name")
    return [leaf for key in keys for leaf in _leaves(f"{prefix}.{key}".strip("."), value[key])]


@lru_cache(maxsize=2)
def names(kind: str) -> tuple[str, ...]:
    """Return the names in a data file, ``accelerators`` or ``clusters``, in its order."""
    return tuple(_table(kind))


@lru_cache(maxsize=256)
def record(kind: str, name: str, *, calibrated: bool = True) -> Record:
    """Return a record of a data file; ``ValueError`` names the known ones.

    Parameters
    ----------
    calibrated
        Whether figures fitted to published kernels replace those of the file.
    """
    table = _table(kind)
    if name not in table:
        raise ValueError(f"{kind[:-1]} is one of {', '.join(table)}, met {name}")
    own: dict[str, Any] = table[name]
    base = record(kind, own["like"], calibrated=calibrated) if "like" in own else Record({}, {})
    stated = _stated(own, base)
    return _fitted(stated, _calibration(name)) if calibrated and kind == "accelerators" else stated


def _stated(own: dict[str, Any], base: Record) -> Record:
    """Return a record with its own fields and those it inherits from ``base``."""
    figures = {key: value for key, value in own.items() if key not in ("like", "sources", "assumed")}
    kept = {
        path: _inherited(path, origin, own["like"])
        for path, origin in base.origins.items()
        if path.split(".")[0] not in figures
    }
    sourced = {path: (status, text) for path, (status, text) in own["sources"].items()}
    assumed = {path: ("assumed", text) for path, text in own.get("assumed", {}).items()}
    return Record(base.figures | figures, kept | sourced | assumed)


def _inherited(path: str, origin: tuple[str, str], relative: str) -> tuple[str, str]:
    """Return the origin of an inherited figure; that of a fitted figure names the relative."""
    status, text = origin
    if path.split(".")[0] not in FITTED or text.startswith("taken from"):
        return origin
    return status, f"taken from {relative}, the nearest relative: {text}"


def _fitted(stated: Record, calibration: dict[str, Any]) -> Record:
    """Return a record with fitted figures; in a table only the fitted entries are replaced."""
    figures, origins = dict(stated.figures), dict(stated.origins)
    for name, value in calibration.get("figures", {}).items():
        if name in ("kernel_bandwidth", "attention"):
            figures[name] = figures.get(name, {}) | value
            origins |= {f"{name}.{kind}": ("derived", calibration["source"]) for kind in value}
        else:
            # the whole group is replaced, so that sources of its former parts no longer apply
            figures[name] = value
            origins = {path: origin for path, origin in origins.items() if path.split(".")[0] != name}
            origins[name] = ("derived", calibration["source"])
    return Record(figures, origins)


def is_calibrated(name: str) -> bool:
    """Return whether an accelerator's kernels were fitted to its own published timings."""
    return bool(_calibration(name))


def fitted_links(*, inside: bool) -> tuple[Link, ...]:
    """Return the links that were fitted to published collectives, either those inside nodes or those between them."""
    entries = (entry for entry in _json("calibration/links.json").values() if ("library" in entry) is inside)
    return tuple(
        Link(
            parse(e["latency"], Dimension.TIME),
            parse(e["bandwidth"], Dimension.BANDWIDTH),
            parse(e.get("launch", "0 us"), Dimension.TIME),
        )
        for e in entries
    )


def _calibration(name: str) -> dict[str, Any]:
    """Return the calibration file of an accelerator; empty where there is none."""
    file = files(__package__).joinpath("calibration", f"{name}.json")
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


@lru_cache(maxsize=2)
def _table(kind: str) -> dict[str, Any]:
    table: dict[str, Any] = _json(f"{kind}.json")
    fitted = _json("calibration/links.json")
    for own in table.values():
        for place in ("intra_node", "inter_node"):
            if "link" in own.get(place, {}):
                _link(own, place, fitted)
    return table


def _json(name: str) -> Any:
    return json.loads(files(__package__).joinpath(name).read_text("utf-8"))


def _link(own: dict[str, Any], place: str, fitted: dict[str, Any]) -> None:
    """Replace the name of a fitted link by its figures, and add their sources; changes the entry in place."""
    figures = own[place]
    name, links = figures.pop("link"), figures.pop("links", 1)
    entry, fit = fitted[name], fitted[name]["fit"]
    bandwidth = parse(entry["bandwidth"], Dimension.BANDWIDTH)
    figures |= {key: entry[key] for key in ("latency", "launch")} | {"bandwidth": f"{links * bandwidth * 1e-9:g} GB/s"}
    text = f"{name}: fitted to {fit['rows']} published collectives of {', '.join(fit['sources'])}"
    fresh = [f"{place}.{key}" for key in ("latency", "bandwidth", "launch")]
    if "library" in entry:
        own["library"] = entry["library"]
        fresh.append("library")
    own["sources"] |= {path: ["derived", text] for path in fresh}
