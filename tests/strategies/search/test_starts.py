"""The plans that an engineer types first are legal, each once, and the ones that the model and the machine call for."""

from dataclasses import replace

import pytest

from meshwise.simulator.catalog import cluster
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.space import Space
from meshwise.strategies.search.starts import engineer_layouts, known_layouts

from ..problems import problem as small_problem

PROBLEMS = (
    ("llama3-8b", "dgx-h100", 1, 32, 8192),
    ("llama3-405b", "dgx-h100", 2048, 2048, 8192),
    ("llama3-8b", "dgx-h100", 2, 16, 65536),
    ("mixtral-8x7b", "dgx-h100", 8, 256, 4096),
    ("deepseek-v3", "gb200-nvl72", 4, 4608, 4096),
    ("t5-11b", "dgx-a100-80gb", 2, 64, 512),
    ("resnet-50", "dgx-a100-80gb", 1, 64, 50176),
    ("llama2-13b", "tpu-v5p", 16, 128, 4096),
)


def problem_of(model: str, machine: str, nodes: int, batch: int, sequence: int) -> Problem:
    graph = build(MODELS[model], sequence, "bf16")
    return Problem(graph, cluster(machine, nodes), Training(batch, graph.sequence))


@pytest.mark.parametrize("stated", PROBLEMS, ids=lambda stated: f"{stated[0]}-{stated[1]}-{stated[2]}")
def test_all_are_legal_and_each_is_there_once_by_a_name_of_its_own(stated: tuple[str, str, int, int, int]) -> None:
    problem = problem_of(*stated)
    named = engineer_layouts(problem)
    assert named
    for name, layout in named:
        assert not list(violations(problem, layout)), name
    assert len({layout for _, layout in named}) == len(named)
    assert len({name for name, _ in named}) == len(named)


def test_a_dense_model_on_one_node() -> None:
    found = dict(engineer_layouts(problem_of(*PROBLEMS[0])))
    assert found["FSDP, full recompute"] == Layout(data=8, zero=3, recompute=Recompute.FULL)
    assert found["ZeRO-1, no recompute"] == Layout(data=8, zero=1)
    # 32 sequences on 8 devices: 4 each are one microbatch
    assert found["DDP without accumulation, no recompute"] == Layout(data=8, microbatch=4)
    assert found["TP 8 + ZeRO-1, no recompute"] == Layout(data=1, tensor=8, zero=1, sequence_parallel=True)
    assert not any("HSDP" in name for name in found)  # a node is all devices


def test_experts_are_laid_out_beside_short_pipelines_whose_states_fit() -> None:
    # Mixtral 8x7B: 46.7e9 parameters, 45.1e9 of them experts'. With TP 2, PP 2 and EP 4 a rank of 16 has
    # (1.6 + 45.1 / 4) / 4 = 3.2e9 of them; parameters and gradients in 2 + 4 bytes are 19 GB, and 12 bytes of states
    # shared by 16 devices / (2 * 2) = 4 data ranks 10 GB: under half of 78 GB
    found = dict(engineer_layouts(problem_of("mixtral-8x7b", "dgx-h100", 2, 256, 4096)))
    layout = found["EP 4 x TP 2 x PP 2, 16 chunks interleaved, no recompute"]
    assert (layout.data, layout.expert, layout.chunks, layout.zero) == (4, 4, 16, 1)
    assert not any("PP 32" in name for name in found)


def test_nodes_share_states_inside() -> None:
    problem = problem_of("llama3-8b", "dgx-h100", 2, 32, 8192)
    found = dict(engineer_layouts(problem))
    wanted = Layout(data=16, zero=3, zero_shards=8, recompute=Recompute.FULL)
    assert found["HSDP, shards in the node, full recompute"] == wanted


def test_a_batch_of_fewer_sequences_than_devices_needs_a_model_axis() -> None:
    # 2,048 sequences on 16,384 devices: each is shared by at least 8
    for name, layout in engineer_layouts(problem_of(*PROBLEMS[1])):
        assert layout.tensor * layout.pipeline >= 8, name


def test_the_shortest_pipeline_is_one_whose_states_fit() -> None:
    # 405e9 parameters in bf16 with fp32 gradients are 6 bytes each: over 8 tensor ranks and p stages 304 / p GB, and
    # a share of 12 bytes of states besides. Half of 80 GB holds that from p = 8 on (38 GB); 4 stages take 76.
    found = [layout for _, layout in engineer_layouts(problem_of(*PROBLEMS[1])) if layout.pipeline > 1]
    assert min(layout.pipeline for layout in found if layout.zero == 1) == 8
    # with all states shared nothing hangs on the pipeline: the shortest that cut 126 layers evenly are tried
    assert {layout.pipeline for layout in found if layout.zero == 3} == {2}


def test_experts_are_shared_inside_a_node() -> None:
    found = dict(engineer_layouts(problem_of(*PROBLEMS[3])))
    assert found["EP 8 + ZeRO-1, no recompute"] == Layout(data=64, expert=8, zero=1)
    assert not any("EP" in name for name, _ in engineer_layouts(problem_of(*PROBLEMS[0])))


def test_long_sequences_are_cut() -> None:
    problem = problem_of(*PROBLEMS[2])
    assert any(layout.context > 1 for _, layout in engineer_layouts(problem))
    graph = build(MODELS["llama3-8b"], 8192, "bf16")
    short = replace(problem, graph=graph, training=replace(problem.training, sequence=8192))
    assert all(layout.context == 1 for _, layout in engineer_layouts(short))


def test_attention_that_keeps_its_scores_is_recomputed_alone_too() -> None:
    kinds = {layout.recompute for _, layout in engineer_layouts(problem_of(*PROBLEMS[5]))}
    assert kinds == set(Recompute)
    kinds = {layout.recompute for _, layout in engineer_layouts(problem_of(*PROBLEMS[0]))}
    assert kinds == {Recompute.NONE, Recompute.FULL}


def test_a_limit_of_a_field_that_a_plan_does_not_use_drops_no_known_plan() -> None:
    # attention says how keys go around where the sequence is cut, a schedule how stages take turns: FSDP has neither
    small = small_problem(devices=4)
    sharded = Layout(data=4, zero=3)
    space = Space(attention=(Attention.ALL_GATHER,), schedule=("gpipe",), starts=(sharded,))
    known = known_layouts(small, space)
    assert replace(sharded, attention=Attention.ALL_GATHER, schedule="gpipe") in known
    assert all(space.allows(layout) for layout in known)
