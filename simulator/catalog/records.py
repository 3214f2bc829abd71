"""The catalog's data files: records by name, with the source of every figure.

A record with ``like`` inherits all fields that it does not state from the record of that name. A file
``calibration/NAME.json``, which `meshwise.simulator.calibration` writes, has figures of an accelerator's kernels that
take precedence over the record's own. ``sources`` maps the path of a figure, or of a group of figures, to a status and
a text; ``assumed`` lists figures that no document states. The entry with the longest path applies.

A link of a cluster may be a name instead: it then has the figures fitted to published collectives
(`meshwise.simulator.calibration`), with ``links`` times the bandwidth, and inside a node also their library. A NIC of
which only the line ``rate`` is known names its kind of ``fabric``, which tells the rest
(`meshwise.simulator.catalog.fabrics`).
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwise.simulator.catalog.fabrics import fabric_default
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.units import Dimension, parse

STATUSES = ("read", "secondary", "derived", "chosen", "assumed")
"""How far a figure can be trusted.

``read`` in a document; ``secondary``: quoted in another document; ``derived``: arithmetic, a fit to
published measurements or the figure of a relative, as its source says; ``chosen``: an allowance
of the model; ``assumed``: no document states it.
"""

FITTED_FIGURES = ("launch", "matmul", "attention", "sustained", "kernel_bandwidth")
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

    def find_origin(self, path: str) -> tuple[str, str] | None:
        """Return status and source of a figure, or ``None`` where it has none."""
        parts = path.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self.origins[prefix] for prefix in prefixes if prefix in self.origins), None)

    def paths(self) -> tuple[str, ...]:
        """Return the paths of all figures; names are no figures."""
        return tuple(_leaf_paths("", {key: value for key, value in self.figures.items() if key not in _NOT_FIGURES}))


def _leaf_paths(prefix: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [prefix]
    keys = (key for key in value if key != "name")
    return [leaf for key in keys for leaf in _leaf_paths(f"{prefix}.{key}".strip("."), value[key])]


@lru_cache(maxsize=2)
def list_names(kind: str) -> tuple[str, ...]:
    """Return the names in a data file, ``accelerators`` or ``clusters``, in its order."""
    return tuple(_read_table(kind))


@lru_cache(maxsize=256)
def read_record(kind: str, name: str, *, calibrated: bool = True) -> Record:
    """Return a record of a data file; ``ValueError`` names the known ones.

    Parameters
    ----------
    calibrated
        Whether figures fitted to published kernels replace those of the file.
    """
    table = _read_table(kind)
    if name not in table:
        raise ValueError(f"{kind[:-1]} is one of {', '.join(table)}, met {name}")
    entry: dict[str, Any] = table[name]
    base = read_record(kind, entry["like"], calibrated=calibrated) if "like" in entry else Record({}, {})
    merged_record = _merge_base(entry, base)
    return (
        _apply_calibration(merged_record, _read_calibration(name))
        if calibrated and kind == "accelerators"
        else merged_record
    )


def _merge_base(entry: dict[str, Any], base: Record) -> Record:
    """Return a record with its own fields and those it inherits from ``base``."""
    figures = {key: value for key, value in entry.items() if key not in ("like", "sources", "assumed")}
    inherited = {
        path: _inherit_origin(path, origin, entry["like"])
        for path, origin in base.origins.items()
        if path.split(".")[0] not in figures
    }
    stated_origins = {path: (status, text) for path, (status, text) in entry["sources"].items()}
    assumed = {path: ("assumed", text) for path, text in entry.get("assumed", {}).items()}
    return Record(base.figures | figures, inherited | stated_origins | assumed)


def _inherit_origin(path: str, origin: tuple[str, str], relative: str) -> tuple[str, str]:
    """Return the origin of an inherited figure; that of a fitted figure names the relative."""
    status, text = origin
    if path.split(".")[0] not in FITTED_FIGURES or text.startswith("taken from"):
        return origin
    return status, f"taken from {relative}, the nearest relative: {text}"


def _apply_calibration(base_record: Record, calibration: dict[str, Any]) -> Record:
    """Return a record with fitted figures; in a table only the fitted entries are replaced."""
    figures, origins = dict(base_record.figures), dict(base_record.origins)
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
    return bool(_read_calibration(name))


def list_fitted_links(*, inside: bool) -> tuple[Link, ...]:
    """Return the links that were fitted to published collectives, either those inside nodes or those between them."""
    entries = _read_json("calibration/links.json").values()
    return tuple(build_link(entry) for entry in entries if ("library" in entry) is inside)


LINE_RATES = {"roce-400g": 50e9, "efa-3200g": 50e9, "efa-400g": 12.5e9, "tcpx-200g": 25e9}
"""Line rates, in bytes/s, of the NICs that were fitted to published collectives."""


def find_fitted_link(name: str) -> tuple[Link, float]:
    """Return a fitted NIC by name, and its line rate in bytes/s; ``ValueError`` names the known ones."""
    if name not in LINE_RATES:
        raise ValueError(f"a fitted NIC is one of {', '.join(LINE_RATES)}, met {name[:40]}")
    return build_link(_read_json("calibration/links.json")[name]), LINE_RATES[name]


def build_link(figures: dict[str, Any]) -> Link:
    """Return the link with the figures of a record."""
    latency, launch = (parse(figures.get(name, "0 us"), Dimension.TIME) for name in ("latency", "launch"))
    return Link(latency, parse(figures["bandwidth"], Dimension.BANDWIDTH), launch)


def _read_calibration(name: str) -> dict[str, Any]:
    """Return the calibration file of an accelerator; empty where there is none."""
    file = files(__package__).joinpath("calibration", f"{name}.json")
    calibration: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return calibration


@lru_cache(maxsize=2)
def _read_table(kind: str) -> dict[str, Any]:
    table: dict[str, Any] = _read_json(f"{kind}.json")
    fits = _read_json("calibration/links.json")
    for entry in table.values():
        for network_key in ("intra_node", "inter_node"):
            if "link" in entry.get(network_key, {}):
                _fill_link(entry, network_key, fits)
        if "fabric" in entry.get("inter_node", {}):
            _fill_fabric(entry)
    return table


def _fill_fabric(cluster_entry: dict[str, Any]) -> None:
    """Replace kind and rate of a fabric by the figures of a NIC, and add their sources; changes the entry in place."""
    figures = cluster_entry["inter_node"]
    default, rate = fabric_default(figures.pop("fabric")), figures.pop("rate")
    nic = default.nic(parse(rate, Dimension.BANDWIDTH))
    figures |= {
        "latency": f"{nic.latency * 1e6:g} us",
        "bandwidth": f"{nic.bandwidth * 1e-9:g} GB/s",
        "launch": f"{nic.launch * 1e6:g} us",
    }
    text = f"{default.share:g} of {rate}, default of {default.kind} fabrics ({default.low:g} to {default.high:g}): "
    cluster_entry["sources"] |= {
        f"inter_node.{key}": ["derived", text + default.source] for key in ("latency", "bandwidth", "launch")
    }


def _read_json(name: str) -> Any:
    return json.loads(files(__package__).joinpath(name).read_text("utf-8"))


def _fill_link(cluster_entry: dict[str, Any], network_key: str, fits: dict[str, Any]) -> None:
    """Replace the name of a fitted link by its figures, and add their sources; changes the entry in place."""
    figures = cluster_entry[network_key]
    name, links = figures.pop("link"), figures.pop("links", 1)
    entry, fit = fits[name], fits[name]["fit"]
    bandwidth = parse(entry["bandwidth"], Dimension.BANDWIDTH)
    figures |= {key: entry[key] for key in ("latency", "launch")} | {"bandwidth": f"{links * bandwidth * 1e-9:g} GB/s"}
    text = f"{name}: fitted to {fit['rows']} published collectives of {', '.join(fit['sources'])}"
    new_paths = [f"{network_key}.{key}" for key in ("latency", "bandwidth", "launch")]
    if "library" in entry:
        cluster_entry["library"] = entry["library"]
        new_paths.append("library")
    cluster_entry["sources"] |= {path: ["derived", text] for path in new_paths}
