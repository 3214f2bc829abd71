"""How far sources of collectives are from each other."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from simulator.calibration.collective_rows import CollectiveRow
from simulator.calibration.collectives import deviations, fit_links, technology_of
from simulator.calibration.noise import ITSELF, Floor, Sizes, Times, floor, repeats


def collective_floors(rows: Sequence[CollectiveRow]) -> tuple[Floor, ...]:
    """Return how far each source is from each other one on the same links, and from itself, beside the model."""
    sources: dict[str, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        sources[row.source].append(row)
    times = {name: Times((*_what(row), row.seconds) for row in own) for name, own in sources.items()}
    return tuple(each for name, own in sources.items() for each in _floors(name, own, rows, times))


def _floors(
    name: str, own: Sequence[CollectiveRow], rows: Sequence[CollectiveRow], times: Mapping[str, Times]
) -> list[Floor]:
    off = deviations(own, fit_links(rows, (name,))).tolist()
    found = []
    for other, known in times.items():
        links = defaultdict(list)
        for row, error in zip(own, off, strict=True):
            compared = known.compared(*_what(row), row.seconds, row.seconds * (1.0 + error)) if other != name else None
            if compared is not None:
                links[str(technology_of(row))].append(compared)
        found += [floor(link, "collectives", name, other, each) for link, each in links.items()]
    several = defaultdict(list)
    for row in own:
        several[str(technology_of(row))].append((*_what(row), row.seconds))
    again = {link: repeats(each) for link, each in several.items()}
    return found + [floor(link, "collectives", name, ITSELF, each) for link, each in again.items() if each]


def _what(row: CollectiveRow) -> tuple[Hashable, Sizes]:
    return (technology_of(row), row.nodes, row.ranks, row.collective, row.algorithm), (row.size,)
