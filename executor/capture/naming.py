"""Names of dims: by the role that an operator gives a dim, one name a dim within every block."""

from collections.abc import Iterable, Mapping, Sequence

from executor.capture.dims import Dim
from simulator.operator_graph import BATCH

NO_HINT = (99, "d")


def named(blocks: Sequence[Iterable[Dim]], same: Mapping[Dim, Dim]) -> dict[Dim, str]:
    """Return the name of every dim.

    Parameters
    ----------
    blocks
        The dims of each block in the order of use. Two dims that share a block have different names;
        dims of different blocks may have the same.
    same
        Dims of other copies of a block -> dims of the first copy.
    """
    homes: dict[Dim, list[int]] = {}
    for number, dims in enumerate(blocks):
        for dim in dict.fromkeys(dims):
            homes.setdefault(dim, []).append(number)
    hints = {dim: set(dim.hints) for dim in homes}
    for dim, first in same.items():
        hints.setdefault(first, set()).update(dim.hints)
    taken: list[set[str]] = [set() for _ in blocks]
    names: dict[Dim, str] = {}
    for dim, places in homes.items():
        names[dim] = BATCH if dim.batch else _free(_role(hints[dim]), [taken[place] for place in places])
        for place in places:
            taken[place].add(names[dim])
    return names | {dim: names[first] for dim, first in same.items() if first in names}


def _role(hints: set[tuple[int, str]]) -> str:
    return min(hints, default=NO_HINT)[1]


def _free(name: str, taken: Sequence[set[str]]) -> str:
    used = {BATCH}.union(*taken)
    number = 0 if name == NO_HINT[1] else 1
    while (candidate := name if number == 1 else f"{name}_{number}") in used:
        number += 1
    return candidate


_WIDE = frozenset(
    {"up", "gate", "fc1", "c_fc", "w1", "w3", "wi", "wi_0", "wi_1", "intermediate", "gate_proj", "up_proj"}
    | {"lin1", "linear1", "dense_h_to_4h"}
)
"""Last parts of names of modules that published transformers call the layer into the feed-forward width."""


def hint_parameter(path: str, axes: Sequence[Dim | None]) -> None:
    """Note what the dims of a parameter are called where no operator says better: by the name of its module."""
    *modules, own = path.split(".")
    wide = (modules[-1] if modules and own in ("weight", "bias") else own) in _WIDE
    for place, dim in enumerate(axes):
        if dim is not None and len(dim.leaves) == 1:
            dim.leaves[0].hints.add((6, "ffn") if wide and place == 0 and len(axes) <= 2 else (9, "hidden"))


def hint_input(axes: Sequence[Dim | None], *, floating: bool) -> None:
    """Note what the dims of an input are called where no operator says better: those of tokens or of an image."""
    names = {2: ("features",), 3: ("sequence", "features"), 4: ("channels", "height", "width")}.get(len(axes), ())
    for dim, name in zip(axes[1:], names, strict=False):
        if dim is not None and floating and len(dim.leaves) == 1:
            dim.leaves[0].hints.add((8, name))
