"""What the simulator says a layer keeps for backward is what autograd keeps."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.model.network import Layer  # noqa: E402
from meshwise.simulator.machine.accelerator import Accelerator  # noqa: E402
from meshwise.simulator.machine.cluster import build_homogeneous  # noqa: E402
from meshwise.simulator.machine.host import Host  # noqa: E402
from meshwise.simulator.machine.topology import Link  # noqa: E402
from meshwise.simulator.models.model import build  # noqa: E402
from meshwise.simulator.models.transformer import Transformer  # noqa: E402
from meshwise.strategies.lowering.stage_costs import StageCosts  # noqa: E402
from meshwise.strategies.plan.completion import complete  # noqa: E402
from meshwise.strategies.plan.layout import Layout  # noqa: E402
from meshwise.strategies.plan.problem import Problem, Training  # noqa: E402

BATCH, SEQUENCE = 4, 64
TOKENS = BATCH * SEQUENCE


def saved_bytes(layer: torch.nn.Module, source: torch.Tensor) -> int:
    """Return the bytes of distinct storages that autograd keeps, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = layer(source)
    assert kept.shape == source.shape
    return sum(found.values())


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("hidden", [128, 256])
def test_a_layer_keeps_what_autograd_saves(attention: str, hidden: int) -> None:
    spec = Transformer(2, hidden, 4, 4, 4 * hidden, 256, attention=attention, tied_embeddings=False)
    # norms keep mean and deviation of every token, which the published count leaves out: below 2 %
    assert autograd_keeps(spec) == pytest.approx(simulator_keeps(spec), rel=0.02)


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("ffn_kind", ["swiglu", "geglu"])
def test_a_llama_layer_keeps_what_autograd_saves(ffn_kind: str, kv_heads: int) -> None:
    spec = Transformer(2, 256, 8, kv_heads, 704, 256, ffn_kind, tied_embeddings=False, positions="rotary")
    told = simulator_keeps(spec)
    # what two norms read and put out, queries and context; keys and values of 32 a head; gates, values, what becomes of
    # gates and the product; a logsumexp a head
    assert told == 4 * TOKENS * (6 * 256 + 2 * kv_heads * 32 + 4 * 704 + 8)
    # it leaves out a root a token of two norms, and a cosine and a sine of 16 angles a position
    assert autograd_keeps(spec) == told + 4 * (2 * TOKENS + 2 * 16 * SEQUENCE)


def simulator_keeps(spec: Transformer) -> int:
    cpu = Accelerator("cpu", (("fp32", 1e9),), memory=1e12, memory_bandwidth=1e9)
    cluster = build_homogeneous("one", cpu, Host("host", 1e12), 1, 1, Link(0.0, 1e9), Link(0.0, 1e9))
    problem = Problem(build(spec, SEQUENCE, "fp32"), cluster, Training(BATCH, SEQUENCE, "fp32", framework="torch"))
    plan = complete(problem, Layout(microbatch=BATCH))
    stage, blocks = StageCosts(problem).plan_costs(plan).stages[0], plan.stages[0].blocks
    return stage.blocks[blocks.index("layers.0")].memory.kept_bytes


def autograd_keeps(spec: Transformer) -> int:
    return saved_bytes(Layer(spec), torch.randn(BATCH, SEQUENCE, spec.hidden, requires_grad=True))
