"""What layers of a Megatron-LM script's own compute again: said, read back, refused, and found by Python."""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_requests import MODELS, TRAINING, problem, request

from meshwise.executor.export.launchers import UnsupportedRequest
from meshwise.executor.supported import UNFUSED_CORE
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.inputs.plan_table import build_layout, list_rule_violations
from meshwise.scenarios.interchange.facts import TrainerRequest, build_plan_document
from meshwise.scenarios.interchange.lines import flatten_document
from meshwise.scenarios.interchange.megatron import MEGATRON
from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.model import build
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recompute, SomeOperators
from meshwise.strategies.search.acceptance import Answers
from meshwise.strategies.search.space import Space

NONE, CORE, FULL = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL
ACTIVATION = SomeOperators(("activation",))
CHEAP = SomeOperators(("input_norm", "attention", "feed_forward_norm", "activation"))
MLP = SomeOperators(("up", "activation", "down"))
CHUNKED: dict[str, Any] = {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "microbatch": 2}
SUBSETS = [
    SomeOperators(tuple(name for bit, name in enumerate(CHEAP.names) if mask >> bit & 1))
    for mask in range(1, 16)
    if mask != 0b0010
]
"""Operators beside products, in the order of a layer; attention alone is what selective means."""
OF_STAGE = st.sampled_from([NONE, CORE, FirstLayers(CORE, 1), FirstLayers(CORE, 2), *SUBSETS])


def reads_back(asked: TrainerRequest) -> str:
    """Return the file of a request, which means its plan and is written again as it was."""
    text = MEGATRON.to_text(asked)
    layout = build_layout(PlanTable.model_validate(build_plan_document(MEGATRON.read(text.encode()))))
    again = complete(asked.problem, layout)
    assert again == asked.plan
    assert MEGATRON.to_text(replace(asked, plan=again)) == text
    return text


def module_in(text: str) -> str:
    """Return the module that a script writes."""
    found = re.search(r"<< 'END'\n(.*?\n)END\n", text, re.DOTALL)
    assert found is not None
    return found[1]


def literal_in(text: str) -> Any:
    """Return what the module says that layers compute again."""
    values = flatten_document(MEGATRON.parse(text.encode(), "file")).values
    assert values["--spec"] == ["recomputed_layers", "layer_spec"]
    return values["RECOMPUTED"]


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("how", SUBSETS, ids=str)
def test_norms_attention_and_activation(model: str, how: SomeOperators) -> None:
    words = dict(zip(CHEAP.names, ("input_layernorm", "core_attn", "pre_mlp_layernorm", "activation"), strict=True))
    assert literal_in(reads_back(request(model, recompute=how))) == (None, tuple(words[name] for name in how.names))


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_operators_of_unfused_attention_are_its_core(model: str) -> None:
    asked = request(model)
    spec = replace(asked.spec, attention="unfused")
    of = replace(asked.problem, graph=build(spec, TRAINING.sequence, TRAINING.dtype))
    how = SomeOperators(("input_norm", *UNFUSED_CORE, "activation"))
    text = reads_back(TrainerRequest("unfused", spec, of, complete(of, Layout(recompute=how))))
    assert literal_in(text) == (None, ("input_layernorm", "core_attn", "activation"))


def _layouts() -> Iterator[tuple[dict[str, Any], Any]]:
    some = FirstLayers(CORE, 3)
    yield {"recompute": some}, (3, ("core_attn",))
    yield {"pipeline": 2, "stages": (5, 3), "recompute": some}, (3, ("core_attn",))
    yield {"recompute": PerStage((ACTIVATION,))}, [(None, ("activation",))]
    yield {"pipeline": 2, "recompute": PerStage((CORE, CORE))}, [(None, ("core_attn",)), (None, ("core_attn",))]
    whole = PerStage((NONE, FirstLayers(CORE, 4)))
    yield {"pipeline": 2, "recompute": whole}, [(None, ()), (4, ("core_attn",))]
    chunks = PerStage((CHEAP, FirstLayers(CORE, 1), ACTIVATION, NONE))
    norms = ("input_layernorm", "core_attn", "pre_mlp_layernorm", "activation")
    pairs = [(None, norms), (1, ("core_attn",)), (None, ("activation",)), (None, ())]
    for stages in ((2, 2, 2, 2), (1, 3, 2, 2)):
        yield CHUNKED | {"stages": stages, "recompute": chunks}, pairs
    beside = {"data": 2, "tensor": 2, "sequence_parallel": True, "overlap_tensor": True}
    yield beside | {"zero": 3, "recompute": CHEAP}, (None, norms)
    yield {"context": 2, "recompute": CHEAP}, (None, norms)


@pytest.mark.parametrize(("choice", "expected"), list(_layouts()), ids=str)
def test_what_differs_by_stage(choice: dict[str, Any], expected: Any) -> None:
    assert literal_in(reads_back(request("llama", **choice))) == expected


@given(hows=st.lists(OF_STAGE, min_size=1, max_size=4), chunks=st.sampled_from([1, 2]), model=st.sampled_from(["gpt"]))
@settings(max_examples=60, deadline=None)
def test_any_list_of_stages(hows: list[Any], chunks: int, model: str) -> None:
    schedule = {"chunks": chunks, "schedule": "interleaved"} if chunks > 1 else {}
    layout = Layout(pipeline=max(1, len(hows) // chunks), recompute=PerStage(tuple(hows)), microbatch=2, **schedule)
    of = problem(model, layout.pipeline)
    if not list_rule_violations(of, layout):
        reads_back(TrainerRequest("drawn", MODELS[model], of, complete(of, layout)))


@pytest.mark.parametrize(
    "choice",
    [
        {"recompute": NONE},
        {"recompute": CORE},
        {"recompute": FULL},
        {"pipeline": 2, "recompute": FirstLayers(FULL, 3)},
        {"recompute": SomeOperators(("attention", "up", "activation", "down"))},
        {"model": "mixture", "recompute": SomeOperators(("expert_activation", "attention"))},
    ],
    ids=str,
)
def test_what_arguments_say_needs_no_module(choice: dict[str, Any]) -> None:
    text = MEGATRON.to_text(request(**choice))
    assert not any(word in text for word in ("--spec", "RECOMPUTED", "mktemp", "PYTHONPATH"))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"pipeline": 2, "recompute": PerStage((FULL, NONE))}, "plan.recompute: none, selective, full"),
        (
            {"pipeline": 2, "recompute": PerStage((CORE, FirstLayers(FULL, 1)))},
            "and activation (--spec), met selective on",
        ),
        ({"pipeline": 2, "recompute": PerStage((MLP, NONE))}, "plan.recompute: none, selective, full"),
        ({"recompute": SomeOperators(("qkv",))}, "plan.recompute: none, selective, full"),
        (
            {"model": "mixture", "recompute": ACTIVATION},
            "with experts, which layers of the script's own do not have (--spec), met activation",
        ),
        (
            {"model": "mixture", "training": "fp8", "recompute": SomeOperators(("expert_activation",))},
            "no activation of experts with fp8, whose scaling is delayed",
        ),
        ({"training": "fp8", "recompute": CHEAP}, "with fp8, whose delayed scaling goes with no norm or activation"),
    ],
    ids=str,
)
def test_what_has_no_words_is_refused(choice: dict[str, Any], reason: str) -> None:
    asked = choice | ({"training": replace(TRAINING, precision="fp8")} if "training" in choice else {})
    with pytest.raises(UnsupportedRequest) as error:
        MEGATRON.to_text(request(**asked))
    assert reason in str(error.value)


def test_latent_attention_is_refused() -> None:
    asked = request("llama", recompute=ACTIVATION)
    latent = replace(asked.spec, latent=LatentAttention(kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8), kv_heads=8)
    with pytest.raises(UnsupportedRequest, match=r"plan\.recompute: .* with latent attention, which layers"):
        MEGATRON.to_text(replace(asked, spec=latent))


def test_attention_alone_goes_with_fp8() -> None:
    """The core's inputs are kept as they are; only what a product keeps in fp8 cannot be given up."""
    reads_back(request("llama", replace(TRAINING, precision="fp8"), recompute=FirstLayers(CORE, 2)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("RECOMPUTED = [", "RECOMPUTED = __import__('os')\n[", "file:38:1: a module of layers is as it was"),
        ('(None, ("activation",)),', "(None, print()),", "file:37:1: a value is a number, text"),
        ('("activation",)', '("activation", "activation")', "file:37:1: RECOMPUTED: a stage is (None, (...)) of"),
        ('("activation",)', '("moe_act",)', "each once and in tuples"),
        ('("activation",)', '["activation"]', "each once and in tuples"),
        ('(None, ("activation",))', '(2, ("activation",))', "or of its first layers such as"),
        ('(1, ("core', '(0, ("core', "or of its first layers such as"),
        ('(1, ("core', '(True, ("core', "or of its first layers such as"),
        ("return output, output_bias", "return output * 2, output_bias", "file:51:1: a module of layers is as it was"),
        ("layer_spec = make_layer_spec()", "import os", "a module of layers is as it was written, met 'import os'"),
        ("mktemp -d", "reboot", "file:19:1: a line is an argument and its words, with nothing for a shell"),
        ("END\nARG", "END\nreboot\nARG", "a line begins with an argument"),
        ("END\nARG", "END\nRECOMPUTED = (None, ())\nARG", "RECOMPUTED is stated once, met it again"),
        ("    --spec recomputed_layers layer_spec\n", "", "--spec: is needed, met nothing"),
        ("layers layer_spec\n", "layers other\n", "is recomputed_layers layer_spec, a module that the script writes"),
        ("    --bf16", "    --recompute-granularity full\n    --bf16", "goes without --spec, met both"),
        ("    --bf16", "    --num-experts 8\n    --bf16", "goes without --spec, met both"),
        ("    --bf16", "    --bf16\n    --fp8-format hybrid", "--fp8-format: goes without input_layernorm"),
    ],
)
def test_a_module_that_is_read_is_one_that_is_written(old: str, new: str, message: str) -> None:
    text = MEGATRON.to_text(request("llama", pipeline=2, recompute=PerStage((FirstLayers(CORE, 1), ACTIVATION))))
    assert old in text
    with pytest.raises(ScenarioError) as error:
        MEGATRON.read(text.replace(old, new, 1).encode(), "file")
    assert message in str(error.value) and str(error.value).startswith("file:")


def test_a_name_alone_is_no_module() -> None:
    text = MEGATRON.to_text(request("llama"))
    spec = "    --spec recomputed_layers layer_spec\n    --bf16"
    for wrong in (
        text.replace("    --bf16", spec),
        text.replace("ARGUMENTS=(", "RECOMPUTED = (None, ())\nARGUMENTS=("),
    ):
        with pytest.raises(ScenarioError):
            MEGATRON.read(wrong.encode(), "file")


def test_the_script_writes_the_module_where_python_finds_it() -> None:
    """Run a script whose torchrun is Python: it finds the module, which says what the plan does."""
    text = MEGATRON.to_text(request("llama", recompute=CHEAP, name="END $(reboot) RECOMPUTED = (None, ())"))
    find = "import importlib.util as u; print(open(u.find_spec('recomputed_layers').origin).read(), end='')"
    shell = f'torchrun() {{ python3 -c "{find}"; rm -r "$LAYERS"; }}\n{text}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (module_in(text), "")
    names = [each.name for each in ast.parse(done.stdout).body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    assert names == ["RecomputedMLP", "RecomputedLayer", "recomputed_modules", "make_layer_spec"]


def test_layers_of_stages_compute_what_the_literal_says() -> None:
    """Run the part of the module that needs no Megatron-LM: all ranks' first chunks are the first stages."""
    how = PerStage((CHEAP, FirstLayers(CORE, 1), ACTIVATION, NONE))
    module = module_in(MEGATRON.to_text(request("llama", **CHUNKED, stages=(1, 3, 2, 2), recompute=how)))
    start, end = module.index("RECOMPUTED = "), module.index("class RecomputedMLP")
    names: dict[str, Any] = {}
    exec(module[start:end], names)
    exec(module[module.index("def recomputed_modules") : module.index("def make_layer_spec")], names)
    config = SimpleNamespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    modules = names["recomputed_modules"]
    assert [len(modules(config, 0, 0, 1)), modules(config, 0, 1, 1), modules(config, 0, 1, 2)] == [
        4,
        ("core_attn",),
        (),
    ]
    assert (modules(config, 1, 0, 2), modules(config, 1, 1, 1)) == (("activation",), ())
    with pytest.raises(ValueError, match="a pair for each of 2 stages, met 4"):
        modules(SimpleNamespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None), 0, 0, 1)


@pytest.mark.parametrize("how", [ACTIVATION, CHEAP, FirstLayers(CORE, 2), PerStage((CHEAP, NONE))], ids=str)
def test_a_search_for_megatron_takes_them(how: Any) -> None:
    for model, accepted in (("llama", True), ("mixture", False)):
        of = problem(model, 2)
        accepts = Acceptance("megatron", MODELS[model])
        refusals = Answers(accepts.list_rules(of)).list_refusals(Layout(pipeline=2, recompute=how))
        assert (refusals == ()) is accepted
        assert accepts.limit_space(of, Space(recompute=(ACTIVATION,))).recompute == (ACTIVATION,)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_other_line_of_a_module_is_read(data: st.DataObject) -> None:
    """Whatever stands in the place of a line of the module, there is one message with its place."""
    text = MEGATRON.to_text(request("llama", pipeline=2, recompute=PerStage((FirstLayers(CORE, 1), CHEAP))))
    lines = text.split("\n")
    first, last = lines.index("LAYERS=$(mktemp -d) || exit 1"), lines.index("END")
    at = data.draw(st.integers(first, last).filter(lambda line: lines[line]))
    word = st.sampled_from(["--bf16", "END", "(None, ()))", "RECOMPUTED = (None, ())", "import os", "]", "$(reboot)"])
    lines[at] = data.draw(word.filter(lambda each: each != lines[at]))
    with pytest.raises(ScenarioError) as error:
        MEGATRON.read("\n".join(lines).encode(), "file")
    assert str(error.value).startswith("file:")
