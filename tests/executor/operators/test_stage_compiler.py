"""The program of one rank is plain torch and computes what the module computes; shapes are those of parts."""

import pytest

torch = pytest.importorskip("torch")

from modules import MODULES, make  # noqa: E402
from one_rank import find_ranks  # noqa: E402
from tiny_jobs import cluster  # noqa: E402

from meshwise.executor.capture.capture import capture  # noqa: E402
from meshwise.executor.capture.captured import CapturedModule  # noqa: E402
from meshwise.executor.operators.local_stage import LocalStage  # noqa: E402
from meshwise.executor.operators.stage_compiler import compile_stage  # noqa: E402
from meshwise.strategies.operators.operator_plan import build_operator_plan  # noqa: E402
from meshwise.strategies.plan.problem import Problem, Training  # noqa: E402
from meshwise.strategies.plan.sharding import OperatorSharding  # noqa: E402


def build(
    captured: CapturedModule, module: torch.nn.Module, ranks: int = 1, *shardings: OperatorSharding
) -> LocalStage:
    training = Training(captured.batch, captured.graph.sequence, "fp64", "sgd", framework="torch")
    problem = Problem(captured.graph, cluster(ranks), training)
    plan = build_operator_plan(problem, {"tensor": ranks}, captured.batch, shardings)
    return compile_stage(captured, module, plan, find_ranks(ranks), 0, torch.device("cpu"))


@pytest.mark.parametrize("name", list(MODULES))
def test_the_program_of_one_rank_computes_what_the_module_computes(name: str) -> None:
    module, inputs = make(name, dtype=torch.float64)
    captured = capture(module, inputs)
    stage = build(captured, module)
    loss = stage((), [inputs[place] for place in stage.input_places])
    loss.backward()
    stage.sum_gradients()
    expected = module(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    for own_name, parameter in module.named_parameters():
        torch.testing.assert_close(stage.parts[own_name].grad, parameter.grad, rtol=1e-12, atol=1e-13)
    for buffer_name, (part, _) in stage.buffer_parts.items():
        torch.testing.assert_close(part, module.get_buffer(buffer_name), rtol=1e-13, atol=1e-13)
    assert set(stage.names.values()) == set(stage.parts) == {own_name for own_name, _ in module.named_parameters()}


def test_parts_are_cut_and_inputs_are_whole() -> None:
    module, inputs = make("mlp", dtype=torch.float64)
    captured = capture(module, inputs)
    first = next(operator for block in captured.graph.blocks for operator in block.operators if operator.parameters)
    (output,) = (dim for dim, _ in first.dims if dim not in first.reduced and dim != "batch")
    block = captured.graph.blocks[0].name
    stage = build(captured, module, 2, OperatorSharding(f"{block}.{first.name}", ((output, ("tensor",)),)))
    assert stage.parts["first.weight"].shape == (16, 8) and stage.parts["second.weight"].shape == (32, 32)
    assert torch.equal(stage.parts["first.weight"], module.first.weight[:16])
    assert stage.example(stage.inputs[0]).shape == inputs[0].shape


def test_an_error_in_an_operator_names_the_users_line() -> None:
    module, inputs = make("mlp", dtype=torch.float64)
    stage = build(capture(module, inputs), module)
    with pytest.raises(RuntimeError, match=r"modules\.py:\d+: "):
        stage((), [inputs[0][:, :3], inputs[1]])
