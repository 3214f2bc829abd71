"""What redistributions between operators of a tiny layer cost, reckoned on paper; and the step that they add up to."""

from random import Random

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.models.layers import linear, norm
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorKind
from meshwise.simulator.units import TICKS_PER_SECOND
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.operators.costs import compute_operator_costs
from meshwise.strategies.operators.pass_costs import EdgeCosts, Setting
from meshwise.strategies.plan.mesh import TENSOR, TENSOR_DEPTH
from meshwise.strategies.plan.sharding import OperatorSharding

from .tiny import WIDE, X, layer, setting, tiny_problem

Cuts = dict[str, tuple[str, ...]]
"""The axes that cut each dim of an operator."""

TORCH, WAITS, HIDES = "torch", "megatron_2021", "megatron"
"""The first keeps what it gathers; the others gather it again beside the product, and the last sums the gradient of
what a product reads beside the product for the gradient of its weight."""

BOTH = {TENSOR_DEPTH: 2, TENSOR: 2}

# in a group of 2, half of a tensor moves to gather it or to scatter its sum, in 1 message of 0.25 s; to sum it, twice


def gather(size: int, bandwidth: float = 64.0) -> float:
    return 0.25 + size / 2 / bandwidth


def reduce(size: int, bandwidth: float = 64.0) -> float:
    return 2 * gather(size, bandwidth)


def edges(how: Setting, cuts: dict[str, Cuts], **kept: tuple[str, Cuts]) -> dict[str, float]:
    """Return the seconds of all redistributions of a microbatch where operators are cut so, whole where not named.

    ``kept`` is what an operator keeps in another layout, and in which.
    """
    (block,) = how.problem.graph.blocks
    shardings = []
    for operator in block.operators:
        keeps = tuple((each, tuple(ways.items())) for name, (each, ways) in kept.items() if name == operator.name)
        own = tuple(cuts.get(operator.name, {}).items())
        shardings.append((OperatorSharding(f"{block.name}.{operator.name}", own, keeps),))
    return {
        f"{block.operators[s].name} {block.operators[t].name}": int(passes[0, 0]) / TICKS_PER_SECOND
        for s, t, passes, _ in EdgeCosts(how).list_redistributions(tuple(shardings))
    }


def tiny(framework: str, bandwidth: float = 64.0, degrees: dict[str, int] | None = None) -> Setting:
    devices = 4 if degrees else 2
    return setting(tiny_problem(layer(), devices=devices, bandwidth=bandwidth, framework=framework), degrees)


def test_the_messages_of_two_ranks() -> None:
    group = tiny(TORCH).rank.groups[TENSOR]
    for collective, seconds in (
        (Collective.ALL_GATHER, gather(X)),
        (Collective.REDUCE_SCATTER, gather(X)),
        (Collective.ALL_REDUCE, reduce(X)),
    ):
        assert group.ticks(collective, X) == seconds * TICKS_PER_SECOND


@pytest.mark.parametrize(("dim", "seconds"), [("ffn", reduce(X)), ("batch", 0.0), ("hidden", 0.0)])
def test_the_gradient_of_what_no_operator_makes_is_summed_by_its_first_reader(dim: str, seconds: float) -> None:
    # up makes its part of ffn from all of x, and of its gradient each rank has an addend; else x comes cut
    how = tiny(TORCH)
    (block,) = how.problem.graph.blocks
    choices = tuple(
        (OperatorSharding(f"layer.{operator.name}", ((dim, (TENSOR,)),) if operator.name == "up" else ()),)
        for operator in block.operators
    )
    first_reads = {number: int(ticks[0]) for number, ticks in EdgeCosts(how).count_first_reads(choices).items()}
    assert first_reads == {0: seconds * TICKS_PER_SECOND}


def test_what_is_made_in_parts_is_summed_forward_and_its_gradient_where_it_is_made_in_parts() -> None:
    # up reads its part of hidden, and what it makes of it is summed forward; its gradient is whole. side makes its part
    # of other of all of x, which is gathered for it, and what it makes of the gradient of x is summed, and scattered.
    # The activation reads all of other; its gradient is whole, and cut for free
    cuts: dict[str, Cuts] = {"up": {"hidden": (TENSOR,)}, "side": {"ffn": (TENSOR,)}}
    assert edges(tiny(TORCH), cuts) == {
        "up activation": reduce(WIDE),
        "up side": gather(X) + gather(X),
        "side activation": gather(WIDE),
    }


def test_what_comes_from_outside_comes_as_its_first_reader_keeps_it() -> None:
    # side reads all of x: nothing is summed for it, but gathered; its gradient is whole, and cut for free
    assert edges(tiny(TORCH), {"up": {"hidden": (TENSOR,)}}) == {"up activation": reduce(WIDE), "up side": gather(X)}
    # up reads x whole, and keeps half of its tokens
    assert edges(tiny(TORCH), {}, up=("x", {"sequence": (TENSOR,)})) == {"up side": gather(X)}


@pytest.mark.parametrize("bandwidth", [128.0, 32.0])
def test_what_is_gathered_again_takes_what_is_left_of_it_beside_the_product(bandwidth: float) -> None:
    # down reads all of active, of which each rank makes the half of its tokens: its gradient is whole, and cut for
    # free. Its backward takes two launches and 2 * 2048 FLOP, 5 s: half of active comes in 2.25 s at 128 byte/s, and in
    # 8.25 s at 32
    cuts: dict[str, Cuts] = {"up": {"sequence": (TENSOR,)}, "side": {"sequence": (TENSOR,)}}
    cuts["activation"] = {"sequence": (TENSOR,)}
    once = gather(WIDE, bandwidth)
    again = {128.0: 0.0, 32.0: 3.25}[bandwidth]
    assert edges(tiny(TORCH, bandwidth), cuts) == {"activation down": once}
    assert edges(tiny(WAITS, bandwidth), cuts) == {"activation down": once + again}
    assert edges(tiny(HIDES, bandwidth), cuts) == {"activation down": once + again}  # nothing is summed


@pytest.mark.parametrize("bandwidth", [1024.0, 64.0])
def test_a_sum_takes_what_is_left_of_it_beside_the_product_for_the_weight(bandwidth: float) -> None:
    # side makes half of other of all of x. The product for the gradient of its weight takes a launch and 1024 FLOP,
    # 1.5 s; the gradient of x is summed in 0.75 s at 1024 byte/s, and in 4.5 s at 64. Then other is gathered
    cuts: dict[str, Cuts] = {"side": {"ffn": (TENSOR,)}}
    other = {"side activation": gather(WIDE, bandwidth)}
    assert edges(tiny(TORCH, bandwidth), cuts) == other | {"up side": reduce(X, bandwidth)}
    assert edges(tiny(WAITS, bandwidth), cuts) == other | {"up side": reduce(X, bandwidth)}
    assert edges(tiny(HIDES, bandwidth), cuts) == other | ({"up side": 3.0} if bandwidth == 64 else {})


@pytest.mark.parametrize(
    ("bandwidth", "waits", "hides"),
    [
        # half of x moves in 2.25 s: gathered, scattered, and again beside the backward of side, 2 launches and 2 * 1024
        # FLOP, 3 s. Where the scatter is beside the second half of it, the gather is beside the first half alone
        (64.0, 2.25 + 2.25, 2.25 + 0.75 + 0.75),
        (32.0, 4.25 + 4.25 + 1.25, 4.25 + 2.75 + 2.75),
        (512.0, 0.5 + 0.5, 0.5),
    ],
)
def test_a_gather_and_a_scatter_are_each_beside_a_product_of_their_own(
    bandwidth: float, waits: float, hides: float
) -> None:
    cuts: dict[str, Cuts] = {"up": {"sequence": (TENSOR,)}, "side": {"ffn": (TENSOR,)}}
    for framework, seconds in ((TORCH, 2 * gather(X, bandwidth)), (WAITS, waits), (HIDES, hides)):
        assert edges(tiny(framework, bandwidth), cuts)["up side"] == seconds


def test_only_the_sum_that_follows_a_product_is_beside_it() -> None:
    # wide is cut twice: the gradient of x is summed along the outer axis, then scattered; nothing is hidden but the
    # second gather. The backward of side takes 2 launches and 512 FLOP, 0.5 s; then (8 * 8 + 8 * 4 + 2 * 8 * 4) * 4
    # bytes, where the gradient is added to its sum, 0.625 s: 2.125 s of 2.25 are hidden
    cuts: dict[str, Cuts] = {"up": {"sequence": (TENSOR,)}, "side": {"ffn": (TENSOR_DEPTH, TENSOR)}}
    assert edges(tiny(HIDES, degrees=BOTH), cuts)["up side"] == 2.25 + reduce(X) + 2.25 + 0.125


@pytest.mark.parametrize("bandwidth", [256.0, 64.0])
def test_of_several_collectives_the_first_is_beside_the_product(bandwidth: float) -> None:
    # each rank has one sequence: half of the gradient of x is summed, and then both are gathered. The product for the
    # weight moves 4 * 8 + 4 * 8 values and 64 twice, 768 bytes: with its launch 1.25 s, of which the sum takes 1 at 256
    cuts: dict[str, Cuts] = {"side": {"batch": (TENSOR_DEPTH,), "ffn": (TENSOR,)}}
    left = reduce(X // 2, bandwidth) - {256.0: 1.0, 64.0: 1.25}[bandwidth]
    assert edges(tiny(HIDES, bandwidth, BOTH), cuts)["up side"] == left + gather(X, bandwidth)
    # a weight that is kept cut is scattered first: then nothing is beside the product
    kept: Cuts = {"hidden": (TENSOR_DEPTH,), "ffn": (TENSOR,)}
    both = reduce(X // 2, bandwidth) + gather(X, bandwidth)
    assert edges(tiny(HIDES, bandwidth, BOTH), cuts, side=("side_weight", kept))["up side"] == both


def test_a_gradient_that_is_only_gathered_is_not_hidden() -> None:
    # side reads its half of hidden of an x that is whole, and makes the gradient of that half
    cuts: dict[str, Cuts] = {"side": {"hidden": (TENSOR,)}}
    assert edges(tiny(HIDES), cuts) == {"up side": gather(X), "side activation": reduce(WIDE)}


def test_nothing_is_beside_products_that_are_no_linear_layers() -> None:
    # an image of 8 values in 4 channels, 2 of them, and 4 filters: its gradient, of 2 * 8 * 4 * 4 bytes, is summed
    builder = BlockBuilder("fp32", {"channels": 4, "filters": 4, "height": 8, "kernel": 1})
    raw, image = (builder.add_tensor(name, "batch channels height") for name in ("raw", "image"))
    made, weight = (
        builder.add_tensor("made", "batch filters height"),
        builder.add_tensor("weight", "filters channels kernel"),
    )
    builder.add_elementwise("first", "batch channels height", (raw,), (image,))
    names = {"parameters": (weight,), "reduced": "channels kernel"}
    dims = "batch height filters channels kernel"
    builder.add_operator("convolve", OperatorKind.CONVOLUTION, dims, (image,), (made,), flops_per_point=2.0, **names)  # type: ignore[arg-type]
    block = builder.build_block("block", (raw,), (made,), layer=True)
    how = setting(tiny_problem(block, devices=2, framework=HIDES))
    assert edges(how, {"convolve": {"filters": (TENSOR,)}}) == {"first convolve": reduce(256)}


def crossing(made: str, read: str) -> Setting:
    """Return two blocks of which the second has other names, or fewer dims, for what the first makes."""
    sizes = {"features": 4, "embedding": 4, "channels": 4, "places": 4, "flat": 16}
    blocks = []
    for name, dims in (("first", made), ("second", read)):
        builder = BlockBuilder("fp32", sizes)
        x, out = (builder.add_tensor(each, dims) for each in ("x", "out"))
        builder.add_elementwise("work", dims, (x,), (out,))
        blocks.append(builder.build_block(name, (x,), (out,), layer=True))
    return setting(tiny_problem(*blocks, devices=2, framework=TORCH))


def crossed(how: Setting, first: Cuts, second: Cuts) -> list[float]:
    """Return the seconds of redistributions of a microbatch between two blocks of one operator each."""
    own = (("first.work", first), ("second.work", second))
    options = tuple((OperatorSharding(name, tuple(cuts.items())),) for name, cuts in own)
    found = EdgeCosts(how).list_redistributions(options)
    return [int(passes[0, 0]) / TICKS_PER_SECOND for _, _, passes, _ in found]


def test_a_tensor_keeps_its_layout_where_the_next_block_names_its_dims_otherwise() -> None:
    # 2 sequences of 4 * 4 values: 128 bytes
    how = crossing("batch features embedding", "batch channels places")
    assert crossed(how, {"embedding": (TENSOR,)}, {"places": (TENSOR,)}) == []
    assert crossed(how, {"embedding": (TENSOR,)}, {}) == [gather(128)]
    assert crossed(how, {}, {"places": (TENSOR,)}) == [gather(128)]  # of the gradient
    # what is flat is cut as the first of the dims that it was made of; of the others nothing is known
    how = crossing("batch features embedding", "batch flat")
    assert crossed(how, {"features": (TENSOR,)}, {"flat": (TENSOR,)}) == []
    assert crossed(how, {"embedding": (TENSOR,)}, {}) == []


def test_what_a_block_only_carries_keeps_its_place_among_what_crosses() -> None:
    # the first block hands on a, which it does not read, before what it makes; the second reads what was made
    blocks = []
    for name, read in (("first", "o"), ("second", "o")):
        builder = BlockBuilder("fp32", {"hidden": 16})
        a, x, out = (builder.add_tensor(each, "batch hidden") for each in ("a", read, "out"))
        builder.add_elementwise("work", "batch hidden", (x,), (out,))
        blocks.append(builder.build_block(name, (a, x), (a, out), layer=True))
    how = setting(tiny_problem(*blocks, devices=2, framework=TORCH))
    # 2 sequences of 16 values: 128 bytes
    assert crossed(how, {"hidden": (TENSOR,)}, {}) == [gather(128)]


def chain() -> Block:
    """A norm, a product, an activation and the product back, of which each alone reads what the one before makes."""
    builder = BlockBuilder("fp32", {"sequence": 4, "hidden": 8, "ffn": 16})
    x, out = (builder.add_tensor(each, "batch sequence hidden") for each in ("x", "out"))
    wide, active = (builder.add_tensor(each, "batch sequence ffn") for each in ("wide", "active"))
    linear(builder, "up", norm(builder, "norm", x, bias=False), (wide,), "ffn")
    builder.add_elementwise("activation", "batch sequence ffn", (wide,), (active,), saved=(wide,))
    linear(builder, "down", active, (out,), "hidden", "ffn")
    return builder.build_block("chain", (x,), (out,), layer=True)


@pytest.mark.parametrize("degrees", [{TENSOR: 2}, BOTH])
@pytest.mark.parametrize("framework", [TORCH, WAITS, HIDES])
@pytest.mark.parametrize("clipping", [False, True])
def test_a_chain_of_operators_takes_the_step_of_its_plan_whatever_is_chosen(
    degrees: dict[str, int], framework: str, clipping: bool
) -> None:
    # no latency: then sums of gradients take as long together as apart, but for a tick of rounding each
    devices = 4 if len(degrees) > 1 else 2
    of = tiny_problem(chain(), devices=devices, latency=0.0, framework=framework, gradient_clipping=clipping)
    costs, cost, random = compute_operator_costs(of, degrees, 2), SimulatedCost(of), Random(f"{degrees} {framework}")
    for _ in range(25):
        choice = tuple(random.randrange(size) for size in costs.graph.sizes)
        step = round(cost.evaluate(costs.build_plan(choice)).step_time * TICKS_PER_SECOND)
        assert abs(costs.graph.time(choice) - step) <= 2 * len(costs.nodes), choice
