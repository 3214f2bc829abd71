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

    __slots__ = ("batch", "distinct_dims", "factors", "hints", "number", "parent", "size")

    def __init__(self, size: int, number: int, *, batch: bool = False) -> None:
        self.size, self.number, self.batch = size, number, batch
        self.parent: Dim | None = None
        self.factors: tuple[Dim, ...] = ()
        self.distinct_dims: set[Dim] = set()
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


TensorDims = tuple[Dim | None, ...]
"""The dim of each torch dim of a tensor; None for a torch dim of size 1."""


def list_leaves(dims: Iterable[Dim | None]) -> tuple[Dim, ...]:
    """Return the dims without factors that a tensor consists of, each once."""
    return tuple(dict.fromkeys(leaf for dim in dims if dim is not None for leaf in dim.leaves))


class DimUnifier:
    """Creates dims, splits, merges and unifies them."""

    def __init__(self) -> None:
        self._count = 0

    def create_dim(self, size: int, *, batch: bool = False) -> Dim:
        """Return a new dim."""
        self._count += 1
        return Dim(size, self._count, batch=batch)

    def create_dims(self, shape: Sequence[int]) -> TensorDims:
        """Return new dims for a tensor of ``shape``."""
        dims = tuple(self.create_dim(size) if size > 1 else None for size in shape)
        self.keep_apart(dims)
        return dims

    def keep_apart(self, dims: Iterable[Dim | None]) -> None:
        """Record that no two of these dims may ever be unified."""
        all_leaves = list_leaves(dims)
        for leaf in all_leaves:
            leaf.distinct_dims.update(other_leaf for other_leaf in all_leaves if other_leaf is not leaf)

    def merge(self, parts: Sequence[Dim]) -> Dim:
        """Return the dim that is the product of ``parts``, the first one outermost."""
        if len(parts) == 1:
            return parts[0]
        merged_dim = self.create_dim(prod(part.size for part in parts))
        merged_dim.factors = tuple(parts)
        return merged_dim

    def split(self, dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...] | None:
        """Return ``dims`` regrouped into dims of ``sizes``; None where the sizes do not nest.

        >>> dims = DimUnifier()
        >>> [part.size for part in dims.split([dims.create_dim(12), dims.create_dim(5)], (3, 20))]
        [3, 20]
        >>> [part.size for part in dims.split([dims.create_dim(7), dims.create_dim(16, batch=True)], (112,))]
        [112]
        """
        old_leaves = [leaf for dim in dims for leaf in dim.leaves]
        pieces = refine_sizes([leaf.size for leaf in old_leaves], list(sizes))
        if pieces is None or not self._split_leaves(old_leaves, pieces):
            return None
        new_leaves = iter([leaf for dim in dims for leaf in dim.leaves])
        return tuple(self.merge(_take_dims(new_leaves, size)) if size > 1 else self.create_dim(1) for size in sizes)

    def unify(self, left_dim: Dim, right_dim: Dim) -> bool:
        """Unify two dims and return True; change nothing and return False where they cannot be unified."""
        left_leaves, right_leaves = left_dim.leaves, right_dim.leaves
        if left_leaves == right_leaves:
            return True
        pieces = refine_sizes([leaf.size for leaf in left_leaves], [leaf.size for leaf in right_leaves])
        if pieces is None or not _can_pair(left_leaves, right_leaves, pieces):
            return False
        if not (self._can_split(left_leaves, pieces) and self._can_split(right_leaves, pieces)):
            return False
        self._split_leaves(left_leaves, pieces)
        self._split_leaves(right_leaves, pieces)
        for left_leaf, right_leaf in zip(left_dim.leaves, right_dim.leaves, strict=True):
            _join_dims(left_leaf.root, right_leaf.root)
        return True

    def _can_split(self, old_leaves: Sequence[Dim], pieces: Sequence[int]) -> bool:
        # samples are never split: a dim of the batch has one factor
        remaining_pieces = iter(pieces)
        leaf_sizes = [_take_sizes(remaining_pieces, leaf.size) for leaf in old_leaves]
        return not any(leaf.batch and len(sizes) > 1 for leaf, sizes in zip(old_leaves, leaf_sizes, strict=True))

    def _split_leaves(self, old_leaves: Sequence[Dim], pieces: Sequence[int]) -> bool:
        """Split dims without factors into sizes ``pieces``; return False where that would split the batch."""
        if not self._can_split(old_leaves, pieces):
            return False
        remaining_pieces = iter(pieces)
        for leaf in old_leaves:
            sizes = _take_sizes(remaining_pieces, leaf.size)
            if len(sizes) > 1:
                leaf.factors = tuple(self.create_dim(size) for size in sizes)
                for factor in leaf.factors:
                    factor.distinct_dims |= leaf.distinct_dims
                    for distinct_dim in leaf.distinct_dims:
                        distinct_dim.root.distinct_dims.add(factor)
                self.keep_apart(leaf.factors)
        return True


def refine_sizes(left_sizes: Sequence[int], right_sizes: Sequence[int]) -> list[int] | None:
    """Return the coarsest common refinement of two sequences of sizes; None where there is none.

    >>> refine_sizes([12, 5], [3, 20]), refine_sizes([6, 2], [4, 3])
    ([3, 4, 5], None)
    """
    if prod(left_sizes) != prod(right_sizes):
        return None
    strides = sorted({*_list_strides(left_sizes), *_list_strides(right_sizes)}, reverse=True)
    if any(outer_stride % inner_stride for outer_stride, inner_stride in pairwise(strides)):
        return None
    return [outer_stride // inner_stride for outer_stride, inner_stride in pairwise(strides)]


def _list_strides(sizes: Sequence[int]) -> Iterator[int]:
    yield 1
    stride = 1
    for size in reversed(sizes):
        stride *= size
        yield stride


def _take_sizes(pieces: Iterator[int], total: int) -> list[int]:
    """Return the next pieces whose product is ``total``."""
    sizes = [next(pieces)]
    while prod(sizes) < total:
        sizes.append(next(pieces))
    return sizes


def _take_dims(parts: Iterator[Dim], total: int) -> list[Dim]:
    """Return the next dims whose sizes multiply to ``total``."""
    dims = [next(parts)]
    while prod(part.size for part in dims) < total:
        dims.append(next(parts))
    return dims


def _can_pair(left_leaves: Sequence[Dim], right_leaves: Sequence[Dim], pieces: Sequence[int]) -> bool:
    """Return whether two sequences of dims may be unified piece by piece."""
    piece_leaves = []
    for side in (left_leaves, right_leaves):
        remaining_pieces = iter(pieces)
        piece_leaves.append([leaf for leaf in side for _ in _take_sizes(remaining_pieces, leaf.size)])
    return all(_can_join(left_leaf, right_leaf) for left_leaf, right_leaf in zip(*piece_leaves, strict=True))


def _can_join(left_dim: Dim, right_dim: Dim) -> bool:
    if left_dim is right_dim:
        return True
    # the shorter set is searched: sets grow with every unified dim
    fewer, root = left_dim, right_dim
    if len(left_dim.distinct_dims) >= len(right_dim.distinct_dims):
        fewer, root = right_dim, left_dim
    is_distinct = any(distinct_dim.root is root for distinct_dim in fewer.distinct_dims)
    return not (left_dim.batch and right_dim.batch) and not is_distinct


def _join_dims(left_dim: Dim, right_dim: Dim) -> None:
    if left_dim is right_dim:
        return
    # the batch represents both, else the older dim
    child_dim, root_dim = sorted((left_dim, right_dim), key=lambda dim: (dim.batch, -dim.number))
    child_dim.parent = root_dim
    root_dim.hints |= child_dim.hints
    root_dim.distinct_dims |= child_dim.distinct_dims
    for distinct_dim in child_dim.distinct_dims:
        distinct_dim.root.distinct_dims.add(root_dim)
