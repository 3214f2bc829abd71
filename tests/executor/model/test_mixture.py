"""A mixture of experts sends every token to its experts; its activation is that of torch, and keeps no more."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from tiny_jobs import SEQUENCE, TINY  # noqa: E402
from torch.nn import functional  # noqa: E402

from meshwise.executor.model.mixture import Mixture, activation, choose_experts, width  # noqa: E402
from meshwise.executor.model.network import Network, initialize  # noqa: E402
from meshwise.simulator.models.experts import Experts  # noqa: E402
from meshwise.simulator.models.transformer import Transformer  # noqa: E402


def spec(kind: str = "swiglu", **experts: int) -> Transformer:
    return replace(TINY, ffn_kind=kind, experts=Experts(**{"count": 4, "top_k": 2, "ffn": 16} | experts))


def made(model: Transformer) -> Mixture:
    mixture = Mixture(model).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mixture


def test_the_choice_is_the_largest_probabilities() -> None:
    # probabilities 1/10, 2/10, 3/10, 4/10: of the two largest 3/7 and 4/7 of their sum
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64).log()
    weights, chosen = choose_experts(scores, 2)
    assert chosen.tolist() == [[3, 2]]
    assert weights[0].tolist() == pytest.approx([4 / 7, 3 / 7], abs=1e-15)
    weights, chosen = choose_experts(scores, 1)  # a single expert's own, for else the router would have no gradient
    assert (chosen.tolist(), weights.item()) == ([[3]], pytest.approx(0.4, abs=1e-15))


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "geglu"])
def test_a_token_gets_the_weighted_sum_of_its_experts(kind: str) -> None:
    mixture = made(spec(kind, shared=2))
    x = torch.randn(2, 5, TINY.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, chosen = choose_experts(mixture.router(x).flatten(0, 1), 2)
    activations = {
        "gelu": torch.nn.functional.gelu,
        "swiglu": lambda wide: torch.nn.functional.silu(wide[0::2]) * wide[1::2],
        "geglu": lambda wide: torch.nn.functional.gelu(wide[0::2]) * wide[1::2],
    }
    act, experts = activations[kind], mixture.experts
    for index, token in enumerate(x.flatten(0, 1)):
        expected = mixture.shared_down.weight @ act(mixture.shared_up.weight @ token)
        for weight, expert in zip(weights[index], chosen[index], strict=True):
            expected = expected + weight * (experts.down[expert] @ act(experts.up[expert] @ token))
        torch.testing.assert_close(mixture(x).flatten(0, 1)[index], expected, rtol=1e-12, atol=1e-12)


def test_experts_that_no_token_chose_have_gradients_of_zero() -> None:
    mixture = made(spec(top_k=1))
    with torch.no_grad():
        mixture.router.weight[3] = 0  # scores x.w of the others: where one is above 0 it is chosen before this one
        mixture.router.weight[:3] = torch.eye(TINY.hidden, dtype=torch.float64)[0]
    x = torch.ones(1, 3, TINY.hidden, dtype=torch.float64)
    mixture(x).sum().backward()
    up = mixture.experts.up.grad.abs().flatten(1).sum(1)
    assert (up > 0).sum() == 1 and up[3] == 0  # all three tokens are alike and go one way


def test_parameters_are_those_of_the_graph() -> None:
    model = spec("swiglu", shared=1, dense_layers=1)
    graph = model.graph(SEQUENCE, "fp32")
    network = Network(model, SEQUENCE, [name for name, _ in graph.occurrences])
    assert sum(parameter.numel() for parameter in network.parameters()) == graph.num_parameters
    assert [layer.mixture is None for layer in network.decoder_layers()] == [True, False, False, False]
    initialize(network, 0)
    whole = dict(network.named_parameters())
    stage = Network(model, SEQUENCE, ["layers.1"])  # the third layer of all
    initialize(stage, 0)
    assert {name for name, _ in stage.named_parameters()} == {name for name in whole if name.startswith("layers.2.")}
    assert all(torch.equal(parameter, whole[name]) for name, parameter in stage.named_parameters())


@pytest.mark.parametrize(("kind", "function"), [("swiglu", functional.silu), ("geglu", functional.gelu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_a_gate_beside_its_value(kind, function, dtype) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    source, gradient = torch.randn(2, 3, 10, dtype=dtype), torch.randn(2, 3, 5, dtype=dtype)
    own, theirs = source.clone().requires_grad_(), source.clone().requires_grad_()
    made, told = activation(kind)(own), function(theirs[..., ::2]) * theirs[..., 1::2]
    made.backward(gradient)
    told.backward(gradient)
    torch.testing.assert_close(made, told)
    torch.testing.assert_close(own.grad, theirs.grad)


def test_without_a_gate_it_is_gelu() -> None:
    x = torch.randn(2, 3)
    assert width("gelu", 3) == 3
    assert torch.equal(activation("gelu")(x), functional.gelu(x))


def test_gradients_are_slopes() -> None:
    wide = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation("swiglu"), (wide,))


def test_gates_values_and_what_becomes_of_gates_are_kept() -> None:
    kept: list[torch.Tensor] = []
    wide = torch.randn(2, 3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        activation("swiglu")(wide)
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [4 * 2 * 3 * 4] * 3
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept} | {wide.untyped_storage().data_ptr()}) == 4


def test_no_rows_are_no_rows() -> None:
    wide = torch.randn(0, 8, requires_grad=True)
    activation("swiglu")(wide).sum().backward()
    assert wide.grad.shape == (0, 8)
