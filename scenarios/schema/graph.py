"""The fields of a graph file, and the values that each allows."""

from typing import Annotated, Literal

from pydantic import Field

from meshwise.scenarios.files.fields import Count, Fraction, OneOf, Table, Text
from meshwise.simulator.models.hugging_face import MAX_LAYERS
from meshwise.simulator.operator_graph import ITEMSIZE, OperatorKind

VERSION = 1
MAX_SIZE = 2**62
MAX_DIMS = 64
"""Most dims of a tensor, as in torch."""

Name = Annotated[str, Field(min_length=1, max_length=300)]
Size = Annotated[int, Count(MAX_SIZE)]
Flops = Annotated[float, Field(ge=0, le=1e18)]
Dtype = Annotated[str, OneOf(lambda: tuple(ITEMSIZE))]
Kind = Annotated[str, OneOf(lambda: tuple(kind.value for kind in OperatorKind))]
Dims = Annotated[list[Name], Field(max_length=MAX_DIMS)]
Sizes = Annotated[list[Size], Field(max_length=MAX_DIMS)]
ParameterKey = Annotated[list[Name], Field(min_length=2, max_length=2)]
Pair = Annotated[list[ParameterKey], Field(min_length=2, max_length=2)]


class GraphTensorTable(Table):
    """A tensor of a block: activations, parameters and data."""

    name: Name
    dims: Dims
    shape: Sizes
    dtype: Dtype
    differentiable: bool = True


class GraphOperatorTable(Table):
    """An operator, by the names of the tensors of its block."""

    name: Name
    kind: Kind
    dims: Dims = Field(description="The iteration space.")
    sizes: Sizes = Field(description="The size of each of the dims, for one sample.")
    inputs: list[Name]
    outputs: list[Name]
    parameters: list[Name] = Field(default=[], description="Tensors that are trained.")
    reduced: list[Name] = Field(default=[], description="Dims that are summed away.")
    uncut: list[Name] = Field(default=[], description="Dims that no axis may cut.")
    flops_per_point: Flops = 0.0
    saved: list[Name] = Field(default=[], description="Tensors that backward reads.")
    executed_fraction: Fraction = 1.0
    recompute_selectively: bool = False


class GraphBlockTable(Table):
    """Operators in the order of execution that occur ``repeat`` times in a row."""

    name: Name
    repeat: Annotated[int, Count(MAX_LAYERS)] = 1
    layer: bool = False
    inputs: list[Name]
    outputs: list[Name]
    tensors: list[GraphTensorTable]
    operators: list[GraphOperatorTable]


class GraphTable(Table):
    """An operator graph of one sample, as `meshwise capture` writes it."""

    version: Literal[1]
    name: Text
    sequence: Size = Field(description="Tokens of a sample; 1 where a sample is not a sequence.")
    precision: Dtype = Field(description="Dtype of the parameters; a scenario's precision takes its place.")
    blocks: Annotated[list[GraphBlockTable], Field(min_length=1)]
    tied: list[Pair] = Field(default=[], description="Pairs of [block, parameter] that are one parameter.")
