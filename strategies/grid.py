"""Tensor parallelism over a grid of ranks: rows by columns, 2-D; with data-parallel ranks around it, 2.5-D.

Tokens lie along rows, what each token has along columns: an activation is cut along ``batch`` by rows,
and along its hidden, head, feed-forward or vocabulary dim by columns, so that a rank has
``1 / (rows * columns)`` of it. So has it of every parameter: a weight's output dim lies along columns
and the dim that is summed along rows.

A product ``C = A B`` then needs a block row of A and a block column of B. SUMMA [1]_ broadcasts them block
by block in ``q`` steps; what a rank receives, ``(q - 1) / q`` of either, is what it receives in the two
all-gathers that are simulated here, one along columns and one along rows, as one collective each and not as a
pipeline of ``q`` steps. In the backward pass ``dA = dC B'`` is summed along columns and ``dB = A' dC`` along
rows, in reduce-scatters, after A and B have been gathered again: per product ``A + B`` forward and
``2 (A + B)`` backward [2]_ [3]_. All products do so; GSPMD [4]_ keeps the weights in the same way, but sums the
result of a layer's second products along columns, which moves less where their input is the wider.
Attention has whole heads and whole sequences on a rank and moves nothing. A norm sums its statistics along
columns [2]_. The table of words has its vocabulary along columns, as the output layer, with which it may be
tied: the ranks of a row look up part of the vocabulary each and sum, as in Megatron-LM.

The 2.5-D grid of ``depth * q * q`` ranks [5]_ is ``depth`` such grids side by side, each with a part of the
batch and all with the same weights: the plan ``data = depth``, whose groups sum gradients once a step, with
the grid's axes inside of it in the mesh.

References
----------
.. [1] van de Geijn and Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm".
.. [2] Xu and You, "An efficient 2D method for training super-large deep learning models" (Optimus), IPDPS 2023,
   arXiv 2104.05343: section 3 and table 1.
.. [3] Colossal-AI, "2D tensor parallelism": 6 (q - 1) / q operands a linear layer, forward and backward.
.. [4] Xu et al. 2021, "GSPMD: general and scalable parallelization for ML computation graphs" (2D sharding).
.. [5] Wang et al., "Tesseract: parallelize the tensor parallelism efficiently", ICPP 2022, arXiv 2105.14500.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain
from math import gcd

from simulator.compute import PRODUCTS
from simulator.operator_graph import BATCH, Block, Operator, OperatorGraph, OperatorKind, Tensor
from strategies.divisors import nearest_divisor
from strategies.mesh import TENSOR, TENSOR_ROWS
from strategies.sharding import OperatorSharding

HIDDEN = "hidden"
"""The dim of what a token has between layers."""

_MATRICES = frozenset({OperatorKind.MATMUL, OperatorKind.GROUPED_MATMUL})
"""Products with a matrix, whose summed dim is large; a convolution sums few channels."""

Cuts = Mapping[str, tuple[str, ...]]
"""Axes that cut each dim, outermost first."""

KeptCuts = tuple[tuple[str, tuple[str, ...]], ...]
"""The same of one tensor, as a plan states it."""


def column_dim(operator: Operator, dim: str | None) -> str | None:
    """Return the dim of an operator that columns cut, given the one that a single tensor axis cuts.

    Of a product it is never one that is summed, for that is gathered.
    """
    names = [name for name, _ in operator.dims]
    summed = operator.reduced if operator.kind in PRODUCTS else ()
    return next((name for name in (dim, HIDDEN) if name in names and name not in summed), None)


def kept_cuts(block: Block, operator: Operator, dim: str | None, cuts: Cuts) -> tuple[tuple[str, KeptCuts], ...]:
    """Return how an operator keeps its parameters, and a product its inputs, given how its dims are cut.

    Parameters are cut along rows besides, and inputs along columns: along ``dim``, which a single tensor axis cuts,
    or the hidden one, where that is summed.
    """
    found = [(name, _parameter(operator, block.tensor[name], cuts)) for name in operator.parameters]
    summed = [each for each in (dim, HIDDEN) if each in operator.reduced]
    if operator.kind in _MATRICES and operator.parameters and summed:
        whole = {**cuts, summed[0]: (TENSOR,)}
        found += [(name, _of(block.tensor[name], whole)) for name in operator.inputs]
    return tuple(found)


def _of(tensor: Tensor, cuts: Cuts) -> KeptCuts:
    return tuple((dim, cuts[dim]) for dim in tensor.dims if dim in cuts)


def _parameter(operator: Operator, parameter: Tensor, cuts: Cuts) -> KeptCuts:
    dim = _row_dim(operator, parameter, cuts)
    return _of(parameter, {**cuts, dim: (*cuts.get(dim, ()), TENSOR_ROWS)})


def _row_dim(operator: Operator, parameter: Tensor, cuts: Cuts) -> str:
    """Return the dim of a parameter that rows cut: of a weight one that is summed, of others the hidden one first.

    One that columns leave whole where there is one; a vector is cut along both axes, as in Colossal-AI, where
    ``Linear2D`` and ``LayerNorm2D`` keep 1 / q^2 of biases and norms.
    """
    whole = [dim for dim in parameter.dims if TENSOR not in cuts.get(dim, ())]
    summed = [dim for dim in whole if dim in operator.reduced] if operator.kind in _MATRICES else []
    hidden = [dim for dim in parameter.dims if dim == HIDDEN]
    return next(chain((dim for dim in hidden if dim in whole), summed, hidden, whole, parameter.dims))


def broken_rules(
    graph: OperatorGraph, shardings: tuple[OperatorSharding, ...], rows: int, columns: int, microbatch: int
) -> Iterator[tuple[str, str]]:
    """Yield every rule that a grid breaks: the field to blame, and what holds and was met."""
    if microbatch % rows:
        near = -(-microbatch // rows) * rows
        yield "microbatch", f"tensor_rows({rows}) divides microbatch, met {microbatch}; nearest: {near}"
    if not any(HIDDEN in dict(operator.dims) for block in graph.blocks for operator in block.operators):
        yield "tensor_rows", f"tensor_rows needs a transformer's dim {HIDDEN}, the model has none; nearest: 1"
        return
    for dim, (size, both) in _sizes(graph, shardings).items():
        ways = rows * columns if both else rows
        if size % ways:
            text = f"tensor_rows({rows}) * tensor({columns}) divides" if both else "tensor_rows divides"
            near = nearest_divisor(size // gcd(size, columns) if both else size, rows)
            yield "tensor_rows", f"{text} {dim}({size}), met {ways}; nearest tensor_rows: {near}"


@lru_cache(maxsize=64)
def _sizes(graph: OperatorGraph, shardings: tuple[OperatorSharding, ...]) -> Mapping[str, tuple[int, bool]]:
    """Return the sizes of the dims of parameters that rows cut, and whether columns divide one of them besides."""
    tensors = {f"{block.name}.{name}": each for block in graph.blocks for name, each in block.tensor.items()}
    found: dict[str, tuple[int, bool]] = {}
    for sharding in shardings:
        block = sharding.operator.rsplit(".", 1)[0]
        for name, cuts in sharding.kept:
            tensor = tensors[f"{block}.{name}"]
            for dim, axes in cuts:
                if TENSOR_ROWS in axes and dim != BATCH:
                    size, both = found.get(dim, (0, False))
                    found[dim] = gcd(size, tensor.shape[tensor.dims.index(dim)]), both or TENSOR in axes
    return found
