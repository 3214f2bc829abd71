"""Finds which dims of tensors are the same, by union and by factoring.

Every torch dim starts as its own dim. Operators *unify* dims: an elementwise sum says that the last dims of both
operands are the same. A reshape *splits* dims into factors, or *merges* several dims into one. Two dims of one tensor
are *distinct*: they are never unified, so that a named dim occurs once in a tensor.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod


class Dim:
    """A dim of some tensors; one that was split, or merged from others, has ``factors``, outermost first."""

    __slots__ = ("apart", "batch", "factors", "hints", "number", "parent", "size")

    def __init__(self, size: int, number: int, *, batch: bool = False) -> None:
        self.size, self.number, self.batch = size, number, batch
        self.parent: Dim | None = None
        self.factors: tuple[Dim, ...] = ()
        self.apart: set[Dim] = set()
        self.hints: set[tuple[int, str]] = set()

    @property
    def root(self) -> "Dim":
        """The representative of all dims that were unified with this one."""
        root = self
        while root.parent is not None:
            root = root.parent
        if root is not self:
            self.parent = root  # a shorter path for the next look-up
        return root

    @property
    def leaves(self) -> tuple["Dim", ...]:
        """The dims without factors that this dim consists of, outermost first."""
        root = self.root
        return tuple(leaf for factor in root.factors for leaf in factor.leaves) if root.factors else (root,)


Axes = tuple[Dim | None, ...]
"""The dim of each torch dim of a tensor; None for a torch dim of size 1."""


def leaves(axes: Iterable[Dim | None]) -> tuple[Dim, ...]:
    """Return the dims without factors that a tensor consists of, each once."""
    return tuple(dict.fromkeys(leaf for axis in axes if axis is not None for leaf in axis.leaves))


class Dims:
    """Creates dims, splits, merges and unifies them."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, size: int, *, batch: bool = False) -> Dim:
        """Return a new dim."""
        self._count += 1
        return Dim(size, self._count, batch=batch)

    def axes(self, shape: Sequence[int]) -> Axes:
        """Return new dims for a tensor of ``shape``."""
        axes = tuple(self.new(size) if size > 1 else None for size in shape)
        self.keep_apart(axes)
        return axes

    def keep_apart(self, axes: Iterable[Dim | None]) -> None:
        """Record that no two of these dims may ever be unified."""
        every = leaves(axes)
        for one in every:
            one.apart.update(other for other in every if other is not one)

    def merge(self, parts: Sequence[Dim]) -> Dim:
        """Return the dim that is the product of ``parts``, the first one outermost."""
        if len(parts) == 1:
            return parts[0]
        merged = self.new(prod(part.size for part in parts))
        merged.factors = tuple(parts)
        return merged

    def split(self, dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...] | None:
        """Return ``dims`` regrouped into dims of ``sizes``; None where the sizes do not nest.

        >>> dims = Dims()
        >>> [part.size for part in dims.split([dims.new(12), dims.new(5)], (3, 20))]
        [3, 20]
        """
        old = [leaf for dim in dims for leaf in dim.leaves]
        pieces = refine([leaf.size for leaf in old], list(sizes))
        if pieces is None or not self._cut(old, pieces):
            return None
        fine = iter([leaf for dim in dims for leaf in dim.leaves])
        return tuple(self.merge(_take(fine, size)) if size > 1 else self.new(1) for size in sizes)

    def unify(self, one: Dim, other: Dim) -> bool:
        """Unify two dims and return True; change nothing and return False where they cannot be unified."""
        left, right = one.leaves, other.leaves
        if left == right:
            return True
        pieces = refine([leaf.size for leaf in left], [leaf.size for leaf in right])
        if pieces is None or not _pairs(left, right, pieces):
            return False
        if not (self._can_cut(left, pieces) and self._can_cut(right, pieces)):
            return False
        self._cut(left, pieces)
        self._cut(right, pieces)
        for first, second in zip(one.leaves, other.leaves, strict=True):
            _join(first.root, second.root)
        return True

    def _can_cut(self, old: Sequence[Dim], pieces: Sequence[int]) -> bool:
        # samples are never split: a dim of the batch has one factor
        remaining = iter(pieces)
        return not any(leaf.batch and len(_sizes(remaining, leaf.size)) > 1 for leaf in old)

    def _cut(self, old: Sequence[Dim], pieces: Sequence[int]) -> bool:
        """Split dims without factors into sizes ``pieces``; return False where that would split the batch."""
        if not self._can_cut(old, pieces):
            return False
        remaining = iter(pieces)
        for leaf in old:
            sizes = _sizes(remaining, leaf.size)
            if len(sizes) > 1:
                leaf.factors = tuple(self.new(size) for size in sizes)
                for factor in leaf.factors:
                    factor.apart |= leaf.apart
                    for other in leaf.apart:
                        other.root.apart.add(factor)
                self.keep_apart(leaf.factors)
        return True


def refine(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """Return the coarsest common refinement of two sequences of sizes; None where there is none.

    >>> refine([12, 5], [3, 20]), refine([6, 2], [4, 3])
    ([3, 4, 5], None)
    """
    if prod(left) != prod(right):
        return None
    strides = sorted({*_strides(left), *_strides(right)}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(strides)):
        return None
    return [outer // inner for outer, inner in pairwise(strides)]


def _strides(sizes: Sequence[int]) -> Iterator[int]:
    yield 1
    stride = 1
    for size in reversed(sizes):
        stride *= size
        yield stride


def _sizes(pieces: Iterator[int], total: int) -> list[int]:
    """Return the next pieces whose product is ``total``."""
    taken = [next(pieces)]
    while prod(taken) < total:
        taken.append(next(pieces))
    return taken


def _take(parts: Iterator[Dim], total: int) -> list[Dim]:
    """Return the next dims whose sizes multiply to ``total``."""
    taken = [next(parts)]
    while prod(part.size for part in taken) < total:
        taken.append(next(parts))
    return taken


def _pairs(left: Sequence[Dim], right: Sequence[Dim], pieces: Sequence[int]) -> bool:
    """Return whether two sequences of dims may be unified piece by piece."""
    of = []
    for side in (left, right):
        remaining = iter(pieces)
        of.append([leaf for leaf in side for _ in _sizes(remaining, leaf.size)])
    return all(_may_join(one, other) for one, other in zip(*of, strict=True))


def _may_join(one: Dim, other: Dim) -> bool:
    if one is other:
        return True
    # the shorter set is searched: sets grow with every unified dim
    fewer, root = (one.apart, other) if len(one.apart) < len(other.apart) else (other.apart, one)
    return not (one.batch and other.batch) and all(each.root is not root for each in fewer)


def _join(one: Dim, other: Dim) -> None:
    if one is other:
        return
    # the batch represents both, else the older dim
    first, second = (one, other) if (one.batch, -one.number) > (other.batch, -other.number) else (other, one)
    second.parent = first
    first.hints |= second.hints
    first.apart |= second.apart
    for each in second.apart:
        each.root.apart.add(first)
