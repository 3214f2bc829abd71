"""What recompute keeps, makes again and runs again, by hand: bytes of a block moment by moment, and its steps."""

from dataclasses import replace

import pytest

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.models.layers import cross_entropy, linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorKind
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.recompute import (
    BlockMemory,
    Moments,
    compute_moments,
    find_backward_sources,
    find_recomputed_operators,
    with_recompute,
)
from meshwise.strategies.lowering.costs.segments import BlockSegments, Checkpoints, Portion, Segment, Share
from meshwise.strategies.lowering.rank_classes.machine import RankProfile
from meshwise.strategies.lowering.timing import RankClock
from meshwise.strategies.plan.framework import MEGATRON, TORCH, Framework
from meshwise.strategies.plan.mesh import CONTEXT, TENSOR
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import ActionKind

from .test_liveness_operators import LOGITS, SIZES, TOKENS, WEIGHT, WIDE, X, head, live

FORWARD, BACKWARD, INPUT, WEIGHTS = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT
MEMORY = BlockMemory(1000, 200, 300, 400, 70, 50, 600, 80, 9, 6, 5)
NEGATIVE = MEMORY._replace(recomputed_bytes=-20, weights=-30)
"""One where gradients count from the start on that only come when activations have gone."""

# bytes of a block


def test_what_is_not_said_is_nothing() -> None:
    assert BlockMemory(1, 2, 3, 4) == (1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0)
    assert Moments(1, 2, 3, (), 4, 5, (), (), 6).lost_bytes == 0


@pytest.mark.parametrize(
    ("memory", "kind", "taken", "given"),
    [
        (MEMORY, FORWARD, 1000, 0),
        (MEMORY, BACKWARD, 200, 200 + 1000),
        (MEMORY, INPUT, 200 + 50, 200 + 50 + 1000 - 70),  # what is deferred stays, gradients that it counts included
        (MEMORY, WEIGHTS, 0, 70),
        (NEGATIVE, BACKWARD, -20, -20 + 1000),
        (NEGATIVE, INPUT, 0 + 50, 50 + 1000 - 70),  # gradients of weights do not count then
        (NEGATIVE, WEIGHTS, -30, -30 + 70),
    ],
)
def test_a_pass_takes_and_gives_back(memory: BlockMemory, kind: ActionKind, taken: int, given: int) -> None:
    assert memory.changes(kind) == (taken, given)


@pytest.mark.parametrize("kinds", [(FORWARD, BACKWARD), (FORWARD, INPUT, WEIGHTS)])
@pytest.mark.parametrize(
    "memory",
    [
        MEMORY,
        NEGATIVE,
        MEMORY.with_late_gradients(),
        NEGATIVE.with_late_gradients(),
        MEMORY.with_buffers(30, 7),
        MEMORY.with_kept_graph(30, 7),
    ],
)
def test_all_that_passes_take_they_give_back(memory: BlockMemory, kinds: tuple[ActionKind, ...]) -> None:
    taken, given = zip(*map(memory.changes, kinds), strict=True)
    assert sum(taken) == sum(given)


def test_every_pass_has_a_fullest_moment_of_its_own() -> None:
    assert [MEMORY.working_bytes(kind) for kind in (FORWARD, BACKWARD, INPUT, WEIGHTS)] == [300, 400, 600, 80]
    assert NEGATIVE.working_bytes(WEIGHTS) == 0


def test_what_makes_gradients_of_inputs_begins_with_a_loss() -> None:
    assert [MEMORY.loss_bytes(kind) for kind in (FORWARD, BACKWARD, INPUT, WEIGHTS)] == [0, 9, 6, 0]


def test_a_late_backward_does_all_with_the_gradients_of_weights() -> None:
    late = MEMORY.with_late_gradients()
    assert late == MEMORY._replace(
        deferred_bytes=1000, gradients=-200, inputs=0, weights=200 + 400, loss_inputs=0, lost_bytes=0
    )
    assert (late.changes(INPUT), late.working_bytes(INPUT), late.loss_bytes(INPUT)) == ((0, 0), 0, 0)
    assert late.changes(WEIGHTS) == (0, 1000)
    below = NEGATIVE.with_late_gradients()
    assert (below.gradients, below.weights, below.changes(INPUT)) == (0, 400 - 20, (0, 0))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # 30 bytes come in a buffer, and 7 stay that were made: they are no more beyond what is kept
        (30, 7, {"kept_bytes": 1000 - 30 + 7, "forward": 300 - 7, "backward": 400 - 7, "inputs": 600 - 7}),
        # a loss has no more than what is left of its pass
        (0, 395, {"kept_bytes": 1000 + 395, "forward": 0, "backward": 5, "inputs": 600 - 395, "loss": 5}),
        (0, 597, {"kept_bytes": 1000 + 597, "forward": 0, "backward": 0, "inputs": 3, "loss": 0, "loss_inputs": 3}),
        # a buffer for more than is kept, and one for more than there is in any pass
        (1100, 700, {"kept_bytes": 0 + 700, "forward": 0, "backward": 0, "inputs": 0, "loss": 0, "loss_inputs": 0}),
    ],
)
def test_what_lies_in_buffers_is_not_counted_twice(before: int, after: int, expected: dict[str, int]) -> None:
    assert MEMORY.with_buffers(before, after) == MEMORY._replace(**expected)


@pytest.mark.parametrize(
    ("before", "after", "gradients", "deferred"),
    [
        # what comes is not given back with the rest; of the gradients those of what is sent are there already
        (30, 7, 50 - 7, 70 - 30 + (50 - 7) - 50 + 7),
        (0, 60, 0, 70 - 0 + 0 - 50 + 60),  # more is sent than gradients count
        (1100, 7, 50 - 7, 70 - 1000 + (50 - 7) - 50 + 7),  # no more comes in a buffer than is kept
    ],
)
def test_what_lies_in_buffers_is_deferred_no_more(before: int, after: int, gradients: int, deferred: int) -> None:
    expected = MEMORY.with_buffers(before, after)._replace(gradients=gradients, deferred_bytes=deferred)
    assert MEMORY.with_kept_graph(before, after) == expected


# bytes of so many sequences

FOUND = Moments(100, 40, 130, ((90, 5), (160, 3), (150, 30)), 20, 7, (150, 187, 190), ((10, 2), (3, 15)), 2, 4)


def test_activations_grow_with_sequences_and_gradients_of_weights_do_not() -> None:
    # of the operators 2 * 90 + 5, 2 * 160 + 3 and 2 * 150 + 30 = 330 the last holds most, and 2 * 160 + 3 without the
    # loss; kept is 2 * 100, with what is made again 2 * 140 = 280
    assert FOUND.scale_memory(2) == BlockMemory(
        kept_bytes=200,
        recomputed_bytes=280 - 200,
        forward=2 * 130 - 200,
        backward=330 - 280,
        deferred_bytes=2 * 20,
        gradients=2 * 7,
        inputs=2 * (190 - 7) - 280,
        weights=2 * 10 + 2,  # and the other one 2 * 3 + 15
        loss=330 - 323,
        loss_inputs=2 * (190 - 187),
        lost_bytes=2 * 4,
    )


def test_one_sequence_is_what_is_meant() -> None:
    # most is now 150 + 30 = 180, and 160 + 3 without the loss
    assert (
        FOUND.scale_memory()
        == FOUND.scale_memory(1)
        == BlockMemory(100, 40, 30, 40, 20, 7, 43, 18, 180 - 163, 190 - 187, 4)
    )


def test_what_comes_late_is_below_what_is_kept() -> None:
    # gradients that are taken off leave 90 at most, less than the 100 that are kept; gradients of weights do not come
    # with those of inputs, which hold 100 and no more
    found = Moments(100, 40, 70, ((80, 5), (90, 0)), 20, 7, (90, 95), (), 2)
    assert found.scale_memory() == BlockMemory(100, 90 - 100, 0, 0, 20, 7)
    # where the 150 are of a loss, all beyond the 140 that are held comes with it
    assert found._replace(
        backward=((80, 5), (150, 0)), inputs=(90, 160), num_before_loss=1
    ).scale_memory() == BlockMemory(100, 40, 0, 150 - 140, 20, 7, 160 - 7 - 140, 0, 150 - 140, 160 - 7 - 140)


# blocks


def layer() -> Block:
    """x, widened, activated and narrowed, then handed on: two weights of 512 bytes."""
    builder = BlockBuilder("bf16", SIZES)
    x, out, y = (builder.add_tensor(name, TOKENS) for name in ("x", "out", "y"))
    wide, active = (builder.add_tensor(name, "batch sequence ffn") for name in ("wide", "active"))
    linear(builder, "up", x, (wide,), "ffn")
    kind = OperatorKind.ELEMENTWISE
    builder.add_operator(
        "act", kind, "batch sequence ffn", (wide,), (active,), saved=(wide,), recompute_selectively=True
    )
    linear(builder, "down", active, (out,), "hidden", "ffn")
    builder.add_elementwise("hand_on", TOKENS, (out,), (y,))
    return builder.build_block("block", (x,), (y,), layer=True)


UP, DOWN, BOTH = SomeOperators(("up",)), SomeOperators(("down",)), SomeOperators(("up", "act"))


@pytest.mark.parametrize(
    ("how", "names"),
    [
        (Recompute.NONE, ""),
        (Recompute.SELECTIVE, "act"),
        (Recompute.FULL, "up act down hand_on"),
        (SomeOperators(("down", "up")), "up down"),  # in the order of the block
    ],
)
def test_only_layers_are_recomputed(how: LayerRecompute, names: str) -> None:
    assert [operator.name for operator in find_recomputed_operators(layer(), how)] == names.split()
    assert find_recomputed_operators(head(), how) == ()


def test_what_leads_to_what_backward_reads_is_read_again() -> None:
    assert find_backward_sources(layer()) == {"up", "act"}
    builder = BlockBuilder("bf16", SIZES)
    x, one, two, three = (builder.add_tensor(name, TOKENS) for name in ("x", "one", "two", "three"))
    for name, source, made, saved in (("a", x, one, ()), ("b", one, two, ()), ("c", two, three, (two,))):
        builder.add_elementwise(name, TOKENS, (source,), (made,), saved)
    assert find_backward_sources(builder.build_block("block", (x,), (three,), layer=True)) == {
        "a",
        "b",
    }  # a by way of b


@pytest.mark.parametrize("framework", [MEGATRON, TORCH])
@pytest.mark.parametrize(
    ("how", "kept", "remade"),
    [
        (Recompute.NONE, X + WIDE + WIDE, 0),  # inputs of all three
        (Recompute.SELECTIVE, X + WIDE, WIDE),  # what is activated goes
        (UP, X + WIDE + WIDE, 0),  # a product, of which another one keeps the result
        (DOWN, X + WIDE + WIDE, 0),
        (BOTH, X, WIDE + WIDE),  # wide is read inside alone
        (SomeOperators(("hand_on",)), X + WIDE + WIDE + X, 0),  # what it reads
        (SomeOperators(("down/2", "hand_on")), X + WIDE + WIDE + X // 2, 0),
        (SomeOperators(("down", "hand_on")), X + WIDE + WIDE, 0),
        (Recompute.FULL, X, WIDE + WIDE),
    ],
)
def test_what_is_kept_and_made_again_is_what_backward_reads(
    framework: Framework, how: LayerRecompute, kept: int, remade: int
) -> None:
    found = compute_moments(live(layer(), framework), how)
    assert (found.kept_bytes, found.remade_bytes) == (kept, remade)


@pytest.mark.parametrize(
    ("how", "held"),
    [
        (Recompute.NONE, [X, X + WIDE, X + WIDE + WIDE, X + WIDE + WIDE]),
        # active is made again for the product alone: the last operator runs backward before
        (Recompute.SELECTIVE, [X, X + WIDE, X + WIDE + WIDE, X + WIDE]),
        (BOTH, [X, X + WIDE, X + WIDE + WIDE, X]),
        (Recompute.FULL, [X, X + WIDE, X + WIDE + WIDE, X + WIDE + WIDE]),  # here it is run again itself
    ],
)
def test_what_is_made_again_is_there_from_its_reader_or_maker_on(how: LayerRecompute, held: list[int]) -> None:
    gradients = [WIDE + X, WIDE + WIDE, X + WIDE, X + X]  # of what each made and what it read
    expected = [each + gradient for each, gradient in zip(held, gradients, strict=True)]
    assert [each for each, _ in compute_moments(live(layer(), MEGATRON), how).backward] == expected


def test_what_several_read_is_made_again_for_the_last_of_them() -> None:
    builder = BlockBuilder("bf16", SIZES)
    x, h, one, two, out = (builder.add_tensor(name, TOKENS) for name in ("x", "h", "one", "two", "out"))
    builder.add_elementwise("makes", TOKENS, (x,), (h,), (x,))
    builder.add_elementwise("first", TOKENS, (h,), (one,), (h,))
    builder.add_elementwise("second", "batch sequence ffn", (h, one), (two,), (h,))
    builder.add_elementwise("last", TOKENS, (two,), (out,))
    found = live(builder.build_block("block", (x,), (out,), layer=True), MEGATRON)
    plain, again = (compute_moments(found, how) for how in (Recompute.NONE, SomeOperators(("makes",))))
    assert (plain.kept_bytes, again.kept_bytes, again.remade_bytes) == (X + X, X, X)
    less = [a - b for (a, _), (b, _) in zip(plain.backward, again.backward, strict=True)]
    assert less == [0, 0, 0, X]  # there once, for both, and not for the last operator


@pytest.mark.parametrize(
    ("kind", "kept"), [(OperatorKind.ATTENTION, X + X), (OperatorKind.MATMUL, X + X), (OperatorKind.NORM, X)]
)
def test_results_of_attention_and_products_stay_for_others(kind: OperatorKind, kept: int) -> None:
    builder = BlockBuilder("bf16", SIZES)
    x, h, out = (builder.add_tensor(name, TOKENS) for name in ("x", "h", "out"))
    builder.add_operator("makes", kind, TOKENS, (x,), (h,), saved=(x,))
    builder.add_elementwise("reads", TOKENS, (h,), (out,), (h,))
    found = compute_moments(
        live(builder.build_block("block", (x,), (out,), layer=True), MEGATRON), SomeOperators(("makes",))
    )
    assert (found.kept_bytes, found.remade_bytes) == (kept, X + X - kept)


def gated() -> Block:
    """A gated activation of 512 bytes into 256, of which a framework may keep as much; and what hands it on."""
    builder = BlockBuilder("bf16", SIZES)
    both, active = (
        builder.add_tensor("both", "batch sequence ffn gate"),
        builder.add_tensor("active", "batch sequence ffn"),
    )
    out = builder.add_tensor("out", "batch sequence ffn")
    builder.add_elementwise("activation", "batch sequence ffn gate", (both,), (active,), (both,))
    builder.add_elementwise("hand_on", "batch sequence ffn", (active,), (out,))
    return builder.build_block("block", (both,), (out,), layer=True)


def test_what_a_gate_becomes_is_kept_or_made_again() -> None:
    plain, again = (
        compute_moments(live(gated(), TORCH), how) for how in (Recompute.NONE, SomeOperators(("activation",)))
    )
    assert (plain.kept_bytes, plain.remade_bytes) == (2 * WIDE + WIDE, 0)
    assert (again.kept_bytes, again.remade_bytes) == (2 * WIDE, WIDE)
    assert compute_moments(live(gated(), MEGATRON), Recompute.NONE).kept_bytes == 2 * WIDE


def test_forward_has_no_more_than_is_kept_and_at_hand() -> None:
    plain, again = (compute_moments(live(layer(), MEGATRON), how).forward for how in (Recompute.NONE, Recompute.FULL))
    assert plain == X + WIDE + WIDE + X + X  # as out is handed on, with all that is kept
    assert again == X + WIDE + WIDE  # as wide is activated


# gradients of weights


def test_products_defer_what_they_read_and_gradients_of_what_they_make() -> None:
    plain, again = (compute_moments(live(layer(), MEGATRON), how) for how in (Recompute.NONE, Recompute.FULL))
    for found in (plain, again):
        assert found.gradients == WIDE + X  # of wide and out
        assert found.deferred_bytes == (X + WIDE) + (WIDE + X)  # x and active besides
        assert found.inputs == tuple(each + WIDE + X for each, _ in found.backward)
        assert found.weights == ((0, 0), (0, 0))  # nothing is gathered, and gradients are added at once
        assert (found.num_before_loss, found.lost_bytes) == (4, 0)


@pytest.mark.parametrize("how", [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
def test_a_graph_that_is_kept_holds_all_until_gradients_of_weights_are_made(how: LayerRecompute) -> None:
    found = compute_moments(live(layer(), TORCH), how)
    everything = X + WIDE + WIDE  # kept or made again
    assert found.kept_bytes + found.remade_bytes == everything
    assert (found.gradients, found.deferred_bytes) == (WIDE + X, everything + WIDE + X)
    # beside that: the gradient of x while those of wide and out stay; of active and wide, and out; of out and active;
    # of y and out
    assert found.inputs == tuple(everything + each for each in (X + WIDE + X, 2 * WIDE + X, X + WIDE, X + X))
    assert found.weights == ((0, WEIGHT), (0, WEIGHT))
    assert [gradient for _, gradient in found.backward] == [WEIGHT, 0, WEIGHT, 0]


@pytest.mark.parametrize(
    ("each", "made", "besides"),
    [
        # a weight has 8 * 32 = 256 elements, and the gradient 512 bytes; what the first product makes comes last
        (1, [512 - 256, 0 - 256, 512 - 256 - 256, 0 - 256 - 256], 512 - 256),
        (2, [0, -512, 0 - 512, -512 - 512], 0),
        (4, [0, -1024, 0 - 1024, -1024 - 1024], 0),  # kept wider than they are made
    ],
)
def test_gradients_that_count_whole_are_left_out_until_they_are_made(each: int, made: list[int], besides: int) -> None:
    found = compute_moments(live(layer(), TORCH), Recompute.NONE, separate_bytes=each)
    assert [gradient for _, gradient in found.backward] == made
    assert found.weights == ((0, besides), (0, besides))


# losses


def last_layer() -> Block:
    """The product with 16 words and its loss, as a layer."""
    builder = BlockBuilder("bf16", SIZES)
    x, logits = builder.add_tensor("x", TOKENS), builder.add_tensor("logits", "batch sequence vocab", "fp32")
    linear(builder, "words", x, (logits,), "vocab")
    loss = cross_entropy(builder, logits, "batch sequence", "vocab", "sequence")
    return builder.build_block("block", (x,), (loss,), layer=True)


@pytest.mark.parametrize(
    ("framework", "kept", "deferred", "lost"),
    [
        (TORCH, X + LOGITS, X + LOGITS + LOGITS // 2, LOGITS),  # all, until the loss gives back its own
        (MEGATRON, X + LOGITS // 2, X + LOGITS // 2, 0),  # what the product reads, and the gradient of what it makes
    ],
)
def test_a_loss_gives_back_the_logits_where_a_graph_is_kept(
    framework: Framework, kept: int, deferred: int, lost: int
) -> None:
    found = compute_moments(live(last_layer(), framework), Recompute.NONE)
    assert (found.kept_bytes, found.gradients, found.deferred_bytes) == (kept, LOGITS // 2, deferred)
    assert (found.num_before_loss, found.lost_bytes) == (1, lost)


def test_backward_of_a_loss_that_is_run_again_does_not_begin_with_it() -> None:
    found = compute_moments(live(last_layer(), TORCH), Recompute.FULL)
    assert (found.kept_bytes, found.num_before_loss, found.lost_bytes) == (X, 3, 0)


# steps

MOVES = TaskKind.TENSOR_COMMUNICATION
GATHER = Segment(MOVES, "gather x", collective=Collective.ALL_GATHER, axis=TENSOR, tensor="x")
OTHER = Segment(MOVES, "gather keys", collective=Collective.ALL_GATHER, axis=CONTEXT, tensor="keys")
RING = Segment(MOVES, "send keys", collective=Collective.ALL_TO_ALL, axis=CONTEXT, overlaps_next=True)
EXCHANGE = Segment(MOVES, "exchange active", collective=Collective.ALL_TO_ALL, axis=TENSOR, tensor="active")
CUT = Segment(TaskKind.FORWARD, "cut active", tensor="active")
SUM = Segment(MOVES, "sum out", collective=Collective.ALL_REDUCE, axis=TENSOR, tensor="out")
RUN = {name: Segment(TaskKind.FORWARD, name) for name in ("up", "act", "down", "hand_on")}
AGAIN = {name: Segment(TaskKind.RECOMPUTE, name) for name in RUN}
CUT_AGAIN = Segment(TaskKind.RECOMPUTE, "cut active", tensor="active")
STEPS = BlockSegments(
    (GATHER, OTHER, RUN["up"], RING, RUN["act"], EXCHANGE, CUT, RUN["down"], SUM, RUN["hand_on"]),
    (Segment(TaskKind.BACKWARD, "all"),),
)


@pytest.mark.parametrize(
    ("how", "again"),
    [
        (Recompute.NONE, ()),
        (UP, (GATHER, AGAIN["up"])),  # what was kept as it was produced
        (Recompute.SELECTIVE, (RING, AGAIN["act"])),  # what goes round a ring
        (DOWN, (AGAIN["down"],)),  # active is kept as it came
        (SomeOperators(("up/2",)), (GATHER, AGAIN["up"]._replace(portion=Portion(Share.CHUNK, 2)))),
        (SomeOperators(("act", "down")), (RING, AGAIN["act"], EXCHANGE, CUT_AGAIN, AGAIN["down"])),
        (SomeOperators(("up", "down")), (GATHER, AGAIN["up"], AGAIN["down"])),
        (
            Recompute.FULL,
            (
                *(GATHER, OTHER, AGAIN["up"], RING, AGAIN["act"], EXCHANGE, CUT_AGAIN, AGAIN["down"]),
                *(SUM, AGAIN["hand_on"]),
            ),
        ),
    ],
)
def test_what_runs_again_comes_before_backward_with_what_brings_it(
    how: LayerRecompute, again: tuple[Segment, ...]
) -> None:
    found = with_recompute(layer(), STEPS, how)
    assert found == BlockSegments(STEPS.forward, (*found.backward[: bool(again)], *again, *STEPS.backward))
    assert [segment.label for segment in found.backward if segment.is_optional] == ["kept inputs"] * bool(again)


def test_what_backward_does_not_read_runs_again_only_where_told() -> None:
    found = with_recompute(layer(), STEPS, Recompute.FULL, reruns_unread=False).backward
    assert found[1:] == (GATHER, OTHER, AGAIN["up"], RING, AGAIN["act"], *STEPS.backward)
    some = with_recompute(layer(), STEPS, SomeOperators(("up", "down")), reruns_unread=False).backward
    assert some[1:] == (GATHER, AGAIN["up"], *STEPS.backward)
    # each that is named is a region, and what does not run again keeps no inputs
    assert [row[0].work for row in (found, some)] == [Checkpoints(1, 2), Checkpoints(2, 1)]


@pytest.mark.parametrize(
    ("how", "regions", "operators"),
    [(Recompute.FULL, 1, 4), (Recompute.SELECTIVE, 1, 1), (SomeOperators(("up", "act", "down")), 3, 3)],
)
def test_a_framework_takes_time_for_every_region_and_two_launches_an_operator(
    how: LayerRecompute, regions: int, operators: int
) -> None:
    region, launch = 2**-10, 2**-20
    slow = Accelerator("slow", (("bf16", 1e12),), 1e9, 1e12, launch=launch, recompute_launch=region)
    first = with_recompute(layer(), STEPS, how).backward[0]
    assert first == Segment(TaskKind.RECOMPUTE, "kept inputs", Checkpoints(regions, operators), 0, is_optional=True)
    found, bare = (RankClock(RankProfile(each, 0.0, {})) for each in (slow, replace(slow, recompute_launch=0.0)))
    assert found.time_segments([first]) == ((first, to_ticks(regions * region + operators * 2 * launch)),)
    assert bare.time_segments([first]) == ()


def test_a_host_keeps_and_sets_back_the_random_state_of_every_region() -> None:
    # 2 launches for each of 3 regions: the device takes no time, the host does where it launches kernels at all
    first = with_recompute(layer(), STEPS, SomeOperators(("up", "act", "down")), num_launches=2).backward[0]
    assert (first.label, first.num_launches) == ("kept inputs", 6)
    device = Accelerator("slow", (("bf16", 1e12),), 1e9, 1e12)
    assert RankClock(RankProfile(device, 1e-6, {})).time_segments([first]) == ((first, 0),)
    assert RankClock(RankProfile(device, 0.0, {})).time_segments([first]) == ()
