"""Single operators computed again: as little memory as simulated, and the readers that the graph states."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny_jobs import SEQUENCE, TINY, cluster  # noqa: E402

from meshwise.executor.job import Job  # noqa: E402
from meshwise.executor.launch.run import run_jobs  # noqa: E402
from meshwise.executor.model.network import Network, initialize  # noqa: E402
from meshwise.executor.model.recompute import NORMS, READERS  # noqa: E402
from meshwise.executor.recording.timeline import read_timeline  # noqa: E402
from meshwise.executor.supported import list_recomputable  # noqa: E402
from meshwise.simulator.engine import simulate  # noqa: E402
from meshwise.simulator.machine.compute import PRODUCTS  # noqa: E402
from meshwise.simulator.models.model import build  # noqa: E402
from meshwise.simulator.models.transformer import Transformer  # noqa: E402
from meshwise.simulator.operator_graph import OperatorKind  # noqa: E402
from meshwise.simulator.program import TaskKind  # noqa: E402
from meshwise.simulator.timeline import Timeline  # noqa: E402
from meshwise.strategies.lowering.lower import lower  # noqa: E402
from meshwise.strategies.plan.completion import complete  # noqa: E402
from meshwise.strategies.plan.layout import Layout  # noqa: E402
from meshwise.strategies.plan.problem import Problem, Training  # noqa: E402
from meshwise.strategies.plan.recomputation import SomeOperators  # noqa: E402

pytestmark = pytest.mark.fresh_ranks  # what is measured here is compared to some bytes

WIDE = Transformer(layers=6, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=512, tied_embeddings=False)


def problem() -> Problem:
    training = Training(8, 8 * SEQUENCE, "fp32", framework="torch")
    return Problem(build(WIDE, 8 * SEQUENCE, "fp32"), cluster(1), training)


def job(*names: str) -> Job:
    layout: dict[str, Any] = {"recompute": SomeOperators(names)} if names else {}
    return Job(WIDE, problem().training, complete(problem(), Layout(microbatch=4, **layout)), steps=1)


JOBS = {
    "nothing": job(),
    "activation": job("activation"),
    "cheap": job("input_norm", "feed_forward_norm", "activation"),
    "wide": job("up", "activation"),
    "core": job("qkv", "attention"),
}


def told(name: str) -> float:
    return simulate(lower(problem(), JOBS[name].plan), "longest_path").peak_memory


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timeline]:
    """The measured timeline of every job."""
    folder: Path = tmp_path_factory.mktemp("operators")
    run_jobs([(each, folder / name) for name, each in JOBS.items()])
    return {name: read_timeline(each.plan, folder / name) for name, each in JOBS.items()}


@pytest.mark.parametrize("name", JOBS)
def test_memory_is_as_simulated(name: str, ran: dict[str, Timeline]) -> None:
    # masks and losses of 47 kB are all that is not simulated
    assert told(name) == pytest.approx(ran[name].peak_memory, rel=0.0015)


def test_what_goes_are_the_results(ran: dict[str, Timeline]) -> None:
    # the widest tensor of a layer: 4 sequences of 128 tokens, 512 values of 4 bytes; 6 layers
    wide = 6 * 4 * 128 * 512 * 4
    peak = {name: timeline.peak_memory for name, timeline in ran.items()}
    assert peak["nothing"] - peak["activation"] == pytest.approx(wide, rel=0.01)
    assert peak["nothing"] - peak["wide"] == pytest.approx(2 * wide, rel=0.05)
    assert any(span.kind is TaskKind.RECOMPUTE for span in ran["wide"].spans)
    assert not any(span.kind is TaskKind.RECOMPUTE for span in ran["nothing"].spans)


def test_results_that_stay_are_read_as_the_graph_says() -> None:
    (layer,) = (block for block in build(TINY, SEQUENCE, "fp32").blocks if block.layer)
    heavy = {each.name for each in layer.operators if each.kind in PRODUCTS | {OperatorKind.ATTENTION}}
    maker = {name: each.name for each in layer.operators for name in each.outputs}
    readers = {
        (maker[name], each.name)
        for each in layer.operators
        for name in each.saved
        if maker.get(name) in heavy and maker[name] != each.name
    }
    assert readers == set(READERS.items())
    assert set(list_recomputable(TINY)) == heavy | {*NORMS, "activation"}


@pytest.mark.parametrize("names", [("activation",), ("up", "activation"), list_recomputable(TINY)], ids=str)
def test_gradients_are_those_of_a_plain_layer_bit_by_bit(names: tuple[str, ...]) -> None:
    found = []
    for how in ((), (SomeOperators(names),)):
        network = Network(TINY, SEQUENCE, ["layers.0"], *how).double()
        initialize(network, 0)
        source = torch.linspace(-1, 1, 2 * SEQUENCE * TINY.hidden, dtype=torch.float64).view(2, SEQUENCE, -1)
        network(source.requires_grad_()).square().sum().backward()
        found.append([source.grad, *(parameter.grad for parameter in network.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
