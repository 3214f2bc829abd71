"""Precisions and optimizers: what they keep of every parameter, and what that costs."""

from collections import Counter
from dataclasses import replace

import pytest

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, operator_time
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import Block, Operator, OperatorKind, Tensor
from meshwise.simulator.program import Category
from meshwise.simulator.units import to_ticks
from meshwise.strategies.bounds.memory import PlanMemory
from meshwise.strategies.lowering.costs.optimizer import Parameters, state_bytes
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts, TimedPass
from meshwise.strategies.lowering.timing import optimizer_ticks
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.schedules.schedule import ActionKind

from ...plan.test_parallelism import COUNT, HIDDEN, SEQUENCE, TOP_K, WIDTH, mixture
from ...problems import IDEAL, describe_cost, find_block_cost, list_stage_memories, problem

LAYERS = 8
PEAKS = (("fp64", 1e11), ("fp16", 1e12), ("bf16", 1e12), ("fp8", 2e12))
FAST = Accelerator("fast", PEAKS, memory=1e12, memory_bandwidth=1e12)


def trained(small: Problem, **changes: object) -> Problem:
    return replace(small, training=replace(small.training, **changes))


def held(small: Problem, layout: Layout) -> dict[Category, int]:
    return {change.category: change.size for change in lower(small, complete(small, layout)).resident_memory}


@pytest.mark.parametrize(
    ("precision", "optimizer", "each"),
    [
        ("fp16", "adamw", (2, 2, 12)),  # Rajbhandari et al. 2020, section 3.1: 2 + 2 + K, K = 12
        ("bf16", "adamw", (2, 4, 12)),
        ("fp8", "adamw", (2, 4, 12)),
        ("fp32", "adamw", (4, 4, 8)),
        ("tf32", "adamw", (4, 4, 8)),
        ("fp64", "adamw", (8, 8, 16)),
        ("bf16", "sgd", (2, 4, 8)),  # the main copy and one momentum
        ("bf16", "lion", (2, 4, 8)),
        ("bf16", "adafactor", (2, 4, 4)),  # the main copy; rows and columns come on top
        ("fp32", "adafactor", (4, 4, 0)),
    ],
)
def test_bytes_of_one_parameter(precision: str, optimizer: str, each: tuple[int, int, int]) -> None:
    training = Training(1, 1, precision, optimizer)
    assert (training.parameter_bytes, training.gradient_bytes, training.optimizer_bytes) == each


@pytest.mark.parametrize(
    ("precision", "states", "optimizer", "num_bytes"),
    [
        ("bf16", "same", "adamw", 4),  # two moments of 2 bytes and no main copy: torch's AdamW on bf16 weights
        ("fp16", "same", "sgd", 2),
        ("bf16", "bf16", "adamw", 8),  # two moments of 2 bytes beside the main copy of 4
        ("bf16", "int8", "adamw", 6),  # two moments of 1 byte beside the main copy of 4
        ("fp32", "int8", "adamw", 2),
        ("fp32", "same", "adamw", 8),
        ("bf16", "fp32", "adamw", 12),
    ],
)
def test_states_are_as_precise_as_stated(precision: str, states: str, optimizer: str, num_bytes: int) -> None:
    training = Training(1, 1, precision, optimizer, state_precision=states)
    assert training.optimizer_bytes == num_bytes
    assert training.optimizer_bytes == training.moment_bytes + training.main_bytes


def test_weights_without_a_main_copy_are_the_shards_that_ranks_gather() -> None:
    small = problem(precision="bf16")
    sizes_by_precision = {}
    for states in ("fp32", "same"):
        changed = trained(small, framework="torchtitan", state_precision=states)
        sizes = held(changed, Layout(data=8, zero=3))
        sizes_by_precision[states] = (sizes.get(Category.PARAMETERS, 0), sizes[Category.OPTIMIZER])
    # of every parameter on a rank: 12 bytes of main weight and moments; else 2 of the weight and 4 of moments
    (main_weights, main_states), (weights, moments) = sizes_by_precision["fp32"], sizes_by_precision["same"]
    assert main_weights == 0 and weights == 2 * main_states / 12 and moments == 4 * main_states / 12


def test_gradients_of_weights_without_a_main_copy_are_as_precise() -> None:
    for framework in ("megatron", "accelerate"):
        assert Training(1, 1, "bf16", framework=framework).gradient_bytes == 4
        assert Training(1, 1, "bf16", framework=framework, state_precision="same").gradient_bytes == 2
        stated = Training(1, 1, "bf16", framework=framework, state_precision="same", gradient_precision="fp32")
        assert stated.gradient_bytes == 4


@pytest.mark.parametrize(
    ("precision", "gradients", "size"),
    [("fp16", "fp32", 4), ("bf16", "same", 2), ("fp8", "same", 2), ("fp64", "same", 8), ("bf16", "fp32", 4)],
)
def test_gradients_are_accumulated_as_one_says(precision: str, gradients: str, size: int) -> None:
    small = trained(problem(devices=1, precision=precision, accelerator=FAST), gradient_precision=gradients)
    assert small.training.gradient_bytes == size
    costs, plan = StageCosts(small), complete(small, Layout())
    assert held(small, Layout())[Category.GRADIENTS] == size * costs.plan_parameters(plan).elements[0]


@pytest.mark.parametrize("field", ["precision", "optimizer", "gradient_precision"])
def test_what_is_not_known_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is one of .*, met some"):
        replace(Training(1, 1), **{field: "some"})


# rows and columns of a layer with hidden 64 and ffn 256, vectors in full: four norm vectors of 64; [64, 192] and its
# bias; [64, 64] and its bias; [64, 256] and its bias; [256, 64] and its bias
LAYER = 4 * 64 + (64 + 192) + 192 + (64 + 64) + 64 + (64 + 256) + 256 + (256 + 64) + 64
# cut in two: heads and ffn are halved, and with them their rows or columns; what is added at the end is not
HALVES = 4 * 64 + (64 + 96) + 96 + (32 + 64) + 64 + (64 + 128) + 128 + (128 + 64) + 64
# [128, 64] tokens and [32, 64] positions; two norm vectors and [64, 128]
ENDS = (128 + 64) + (32 + 64) + 2 * 64 + (64 + 128)
HALF_ENDS = (64 + 64) + (32 + 64) + 2 * 64 + (64 + 64)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (Layout(data=2), LAYERS * LAYER + ENDS),
        (Layout(data=2, zero=1), -(-(LAYERS * LAYER + ENDS) // 2)),
        (Layout(tensor=2), LAYERS * HALVES + HALF_ENDS),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adafactor_keeps_four_bytes_of_each_row_and_column(layout: Layout, rows: int, precision: str) -> None:
    small = trained(problem(devices=2, layers=LAYERS, precision=precision), optimizer="adafactor")
    count = StageCosts(small).plan_parameters(complete(small, layout)).elements[0]
    main = 4 * (-(-count // 2) if layout.zero else count) if precision == "bf16" else 0
    assert held(small, layout)[Category.OPTIMIZER] == 4 * rows + main
    assert held(small, layout)[Category.OPTIMIZER] < held(trained(small, optimizer="sgd"), layout)[Category.OPTIMIZER]


def test_a_tied_table_is_factored_once_where_both_its_ends_are() -> None:
    tied, apart = (trained(problem(devices=1, tied=tied), optimizer="adafactor") for tied in (True, False))
    rows = [
        StageCosts(each).plan_parameters(complete(each, Layout())).positions[0].factored_elements
        for each in (tied, apart)
    ]
    assert rows[1] - rows[0] == 128 + 64


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", 12 * 1000), ("adafactor", 4 * 1000 + 4 * 70)])
def test_the_step_of_an_optimizer_is_its_traffic(optimizer: str, state: int) -> None:
    small = trained(problem(devices=1, precision="bf16"), optimizer=optimizer)
    parameters = Parameters(elements=1000, tensors=3, factored_elements=70)
    # gradients of 4 bytes in, state in and out, parameters of 2 bytes out, at 1e12 byte/s
    expected = to_ticks((4 * 1000 + 2 * state + 2 * 1000) / 1e12)
    assert optimizer_ticks(IDEAL, small.training, complete(small, Layout()), parameters) == expected


def test_fp8_keeps_the_weight_twice_more_and_inputs_of_products_in_one_byte() -> None:
    wide, narrow = (problem(devices=1, layers=LAYERS, precision=p, accelerator=FAST) for p in ("bf16", "fp8"))
    assert wide.graph == narrow.graph
    weights = LAYERS * (64 * 192 + 64 * 64 + 2 * 64 * 256)
    sizes = [held(small, Layout()) for small in (wide, narrow)]
    assert sizes[1][Category.PARAMETERS] - sizes[0][Category.PARAMETERS] == 2 * weights
    assert {c: n for c, n in sizes[0].items() if c is not Category.PARAMETERS} == {
        c: n for c, n in sizes[1].items() if c is not Category.PARAMETERS
    }
    # of 32 tokens, both norms' outputs and the activation's lose a byte; the context, which attention keeps as it
    # is, is kept in fp8 besides
    kept = [list_stage_memories(StageCosts(each), complete(each, Layout()))[0].kept_bytes for each in (wide, narrow)]
    assert kept[0] - kept[1] == LAYERS * 32 * (64 + 64 + 256 - 64)
    assert PlanMemory(StageCosts(narrow)).peak(complete(narrow, Layout())) > 0


def ticks_of(row: TimedPass) -> dict[str, int]:
    """Return the ticks of every step of a pass by its label."""
    return {step.label: ticks for step, ticks in row.segments}


def test_a_product_in_fp8_runs_at_its_peak_after_a_cast() -> None:
    small = problem(devices=1, precision="fp8", accelerator=FAST)
    passes = StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks[1].passes
    forward, backward = ticks_of(passes.forward), ticks_of(passes.backward)
    # 2 m n k FLOP at 2e12 FLOP/s; the input of 2 bytes is read, and written in 1 byte twice, at 1e12 byte/s
    m, n, k = 32, 256, 64
    assert forward["up"] == pytest.approx(to_ticks(2 * m * n * k / 2e12 + 4 * m * k / 1e12), abs=1)
    assert backward["up"] == pytest.approx(to_ticks(4 * m * n * k / 2e12 + 4 * m * n / 1e12), abs=1)
    wide = problem(devices=1, precision="bf16", accelerator=FAST)
    same = StageCosts(wide).plan_costs(complete(wide, Layout())).stages[0].blocks[1].passes
    assert forward["attention"] == ticks_of(same.forward)["attention"]


def experts_of(precision: str, **changes: object) -> Problem:
    """Return a network of experts in a precision; all its devices multiply in fp8."""
    small = mixture(devices=4)
    machine = problem(devices=4, accelerator=FAST).cluster
    training = replace(small.training, precision=precision, **changes)
    spec = Transformer(
        4, HIDDEN, 8, 8, 256, 128, ffn_kind="swiglu", tied_embeddings=False, positions="rotary",
        experts=Experts(COUNT, TOP_K, WIDTH),
    )  # fmt: skip
    return Problem(build(spec, SEQUENCE, training.dtype), machine, training)


def test_experts_multiply_in_fp8_and_their_router_does_not() -> None:
    found = []
    for precision in ("bf16", "fp8"):
        small = experts_of(precision)
        layer = StageCosts(small).plan_costs(complete(small, Layout(data=4))).stages[0].blocks[1]
        found.append(ticks_of(layer.passes.forward))
    # 8 experts of 32 * 2 / 8 = 8 tokens: [8, 64] by [64, 2 * 32]; 2 m n k FLOP at 2e12 FLOP/s, and a cast that reads
    # m k elements of 2 bytes and writes them in 1 byte twice, at 1e12 byte/s
    m, n, k = 8, 64, 64
    assert found[1]["expert_up"] == pytest.approx(8 * to_ticks(2 * m * n * k / 2e12 + 4 * m * k / 1e12), abs=8)
    assert found[0]["expert_up"] == pytest.approx(8 * to_ticks(2 * m * n * k / 1e12), abs=8)
    assert found[0]["router"] == found[1]["router"]


def test_a_convolution_in_fp8_casts_its_image_and_not_its_patches() -> None:
    # [1, 64, 8, 8] by [64, 64, 3, 3]: 2 * 64 * 64 * 576 FLOP at 2e12 FLOP/s are more than what it moves; the
    # image's 64 * 64 elements of 2 bytes are read, and written in 1 byte twice
    image = Tensor("image", ("batch", "channels", "height", "width"), (1, 64, 8, 8), "bf16")
    made = Tensor("made", ("batch", "filters", "height", "width"), (1, 64, 8, 8), "bf16")
    weight = Tensor("weight", ("filters", "channels", "kernel"), (64, 64, 9), "bf16")
    dims = (("batch", 1), ("height", 8), ("width", 8), ("filters", 64), ("channels", 64), ("kernel", 9))
    kind, names = OperatorKind.CONVOLUTION, (("image",), ("made",), ("weight",), ("channels", "kernel"))
    block = Block("block", (Operator("convolve", kind, dims, *names),), (image, made, weight), ("image",), ("made",))
    seconds = operator_time(FAST, block, block.operators[0], dict(dims), Pass.FORWARD, quantised=True)
    assert seconds == pytest.approx(2 * 64 * 64 * 576 / 2e12 + 4 * 64 * 64 / 1e12)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_split_backward_takes_what_a_whole_one_takes(precision: str) -> None:
    # in fp8 the cast comes with the gradients of inputs: it is launched once
    small = experts_of(precision)
    plan = complete(small, Layout(data=2, pipeline=2, schedule="zb1p"))
    costs = StageCosts(small)
    for cost in costs.stage_cost(plan, 0, costs.machine(plan).rank(0)).blocks:
        inputs, weight_pass = (cost.passes.select(kind).segments for kind in (ActionKind.INPUT, ActionKind.WEIGHT))
        parts = [*inputs, *weight_pass]
        assert sum(ticks for _, ticks in parts) == cost.backward_ticks
        apart = {step.label for step, _ in inputs} & {step.label for step, _ in weight_pass}
        whole = sum(step.num_launches for step, _ in cost.passes.backward.segments)
        # gradients apart, launched so
        assert sum(step.num_launches for step, _ in parts) == whole + len(apart - {"nothing"})
    # 8 experts of 8 tokens: one of the two products, [64, 8] by [8, 64], at 1e12 or 2e12 FLOP/s; at 1e12 byte/s it
    # reads its operands, and reads and writes the sum of 4-byte gradients, which takes longer in fp8
    weights = ticks_of(costs.plan_costs(plan).stages[1].blocks[0].passes.select(ActionKind.WEIGHT))
    read = 8 * 2 * 8 * 64 * (1 if precision == "fp8" else 2)
    seconds = max(8 * 2 * 8 * 64 * 64 / dict(FAST.peak_flops)[precision], (read + 8 * 64 * 64 * 2 * 4) / 1e12)
    assert weights["expert_up"] == pytest.approx(to_ticks(seconds), rel=1e-3)


@pytest.mark.parametrize("expert", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_adafactor_factors_each_expert_by_itself(expert: int, zero: int) -> None:
    # of 8 experts on 4 layers: [64, 2 * 32] and [32, 64]; with ZeRO the 4 / expert ranks that hold them share them
    small = experts_of("fp32", optimizer="adafactor")
    plan = complete(small, Layout(data=4, expert=expert, zero=zero))
    (parameters,) = StageCosts(small).plan_parameters(plan).positions
    (whole,) = StageCosts(small).plan_parameters(complete(small, Layout(data=4))).positions
    rows = 4 * (COUNT // expert) * ((64 + 2 * 32) + (32 + 64))
    assert parameters.factored_expert_elements == (rows if expert > 1 else 0)
    assert whole.factored_elements - parameters.factored_elements == 4 * (COUNT - COUNT // expert) * (
        (64 + 64) + (32 + 64)
    )
    dense = parameters.factored_elements - parameters.factored_expert_elements
    share = (
        -(-dense // 4) - (-parameters.factored_expert_elements // (4 // expert))
        if zero
        else parameters.factored_elements
    )
    assert state_bytes(small.training, plan, parameters) == 4 * share


def test_the_logits_stay_out_of_fp8() -> None:
    heads = []
    for precision in ("bf16", "fp8"):
        small = problem(devices=1, precision=precision, accelerator=FAST)
        heads.append(StageCosts(small).plan_costs(complete(small, Layout())).stages[0].blocks[-1])
    assert describe_cost(heads[0]) == describe_cost(heads[1])


@pytest.mark.parametrize(
    "layout", [Layout(data=2, zero=1), Layout(data=2, zero=3), Layout(tensor=2), Layout(pipeline=2)]
)
def test_frozen_weights_cost_no_gradients_and_no_states(layout: Layout) -> None:
    # backward of a product is two products, of which one is left; of all else as much as with weights that are trained
    small = problem(devices=2, precision="bf16")
    passes = []
    for each in (small, trained(small, frozen=True)):
        costs = StageCosts(each)
        plan = complete(each, layout)
        counts: Counter[str] = Counter()  # a product beside whose second half a sum runs is two steps
        for step, ticks in find_block_cost(costs, plan, "layers").passes.backward.segments:
            counts[step.label] += ticks if step.collective is None else 0
        passes.append(counts)
    assert passes[0].keys() == passes[1].keys()
    for name, ticks in passes[0].items():
        product = name in ("qkv", "projection", "up", "down")
        assert 0 < passes[1][name] < 0.7 * ticks if product else passes[1][name] == ticks, name
    kept, frozen = held(small, layout), held(trained(small, frozen=True), layout)
    assert frozen[Category.PARAMETERS] == kept[Category.PARAMETERS]
    assert frozen[Category.GRADIENTS] == frozen[Category.OPTIMIZER] == 0 < kept[Category.OPTIMIZER]
    assert optimizer_ticks(IDEAL, trained(small, frozen=True).training, complete(small, layout), Parameters(9, 9)) == 0


@pytest.mark.parametrize(
    ("framework", "precision", "states", "beside", "gathered"),
    [
        ("megatron", "bf16", 12, 0, 2),  # two moments and a main weight of 4 bytes
        ("nemo", "bf16", 10, 0, 2),  # of the main weight the 2 bytes that bf16 lacks
        ("megatron", "fp8", 12, 2, 2),  # beside bf16 an fp8 copy and its transpose
        ("nemo", "fp8", 10, 0, 1),  # fp8 and its transpose in the place of bf16
        ("nemo", "fp16", 12, 0, 2),
        ("torch", "fp8", 12, 0, 2),  # torchao casts in every forward
    ],
)
def test_nemo_keeps_and_gathers_less(framework: str, precision: str, states: int, beside: int, gathered: int) -> None:
    training = Training(8, 32, precision, framework=framework)
    assert (training.optimizer_bytes, training.more_bytes, training.updated_bytes) == (states, beside, gathered)
