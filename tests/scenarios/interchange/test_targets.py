"""A search for a target looks among what the target can say, and at all of it that the space has."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_requests import MODELS, TRAINING, problem, request
from test_laws import LAYOUTS, TRAININGS, drawn

from meshwise.executor.export.launchers import UnsupportedRequest
from meshwise.executor.supported import find_unsupported
from meshwise.scenarios.interchange.facts import LayoutFacts, Meanings, TrainerRequest, collect_facts
from meshwise.scenarios.interchange.targets import EXECUTE, NAMES, TARGETS, Acceptance, find_sayable
from meshwise.scenarios.scenario import Scenario, SearchSettings
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.acceptance import FIELDS, Answers
from meshwise.strategies.search.space import Space, layouts

from ...pace import least_cpu
from .golden import GOLDEN

EACH = pytest.mark.parametrize("name", NAMES)


def exported(request: TrainerRequest, name: str) -> tuple[str, ...]:
    """Return the reasons for which an export refuses a plan, or the executor a run of it."""
    if name == EXECUTE:
        return find_unsupported(request.spec, request.problem.training, request.plan)
    try:
        TARGETS[name].to_text(request)
    except UnsupportedRequest as error:
        return (str(error).partition(": ")[2],)
    return ()


@EACH
@given(choice=LAYOUTS, model=st.sampled_from(list(MODELS)), training=TRAININGS)
@settings(max_examples=120, deadline=None)
def test_a_layout_is_refused_for_the_reasons_of_the_export(
    name: str, choice: dict[str, Any], model: str, training: Any
) -> None:
    asked = drawn(choice, model, training)
    if asked is None:
        return
    accepts = Acceptance(name, asked.spec)
    reasons = accepts.list_refusals(asked.problem, asked.plan)
    assert Answers(accepts.list_rules(asked.problem)).list_refusals(Layout(**choice)) == reasons
    expected = exported(asked, name)
    assert (reasons if name == EXECUTE else ("; ".join(reasons),) * bool(reasons)) == expected


@given(choice=LAYOUTS, model=st.sampled_from(list(MODELS)))
@settings(max_examples=100, deadline=None)
def test_fields_of_a_layout_mean_what_those_of_its_plan_mean(choice: dict[str, Any], model: str) -> None:
    asked = drawn(choice, model, TRAINING)
    if asked is not None:
        facts = LayoutFacts({}, Meanings(asked.problem), Layout(**choice))
        assert {name: facts[name] for name in collect_facts(asked) if name.startswith("plan.")} == {
            name: value for name, value in collect_facts(asked).items() if name.startswith("plan.")
        }


def small(model: str, ranks: int) -> Scenario:
    of = problem(model, ranks)
    return Scenario("small", "small.yaml", of, MODELS[model], None, SearchSettings(), None, ())


@pytest.mark.parametrize(("model", "ranks"), [("gpt", 4), ("llama", 8), ("mixture", 4), ("llama", 16)])
@EACH
def test_what_a_search_finds_for_a_target_it_can_say(name: str, model: str, ranks: int) -> None:
    value = small(model, ranks)
    if Acceptance(name, value.spec).list_general_reasons(value.problem):
        with pytest.raises(ValueError, match=r"can (say|run) no plan of this scenario"):
            value.search(target=name)
        return
    best = value.search("best_first", target=name).best
    assert best is not None
    assert exported(TrainerRequest("found", value.spec, value.problem, best.plan), name) == ()


@EACH
def test_a_space_for_a_target_has_all_that_it_can_say(name: str) -> None:
    """The levels of ZeRO and the schedules are those of the target; of these all that is accepted is there once."""
    value = small("gpt" if name == EXECUTE else "llama", 4)
    space = value.for_target(name).make_space()
    accepted = Answers(Acceptance(name, value.spec).list_rules(value.problem))
    usual = replace(space, accepts=None)
    expected = [layout for layout in layouts(value.problem, usual) if not accepted.list_refusals(layout)]
    assert list(layouts(value.problem, space)) == expected
    assert expected


def limits(name: str, model: str = "llama") -> dict[str, tuple[Any, ...]]:
    return find_sayable(Acceptance(name, MODELS[model]).list_rules(problem(model, 4)))


def test_limits_are_those_that_the_documentation_of_trainers_names() -> None:
    # torchtitan: replicas or FSDP, attention over gathered keys and values
    assert limits("torchtitan")["zero"] == (0, 3)
    assert limits("torchtitan")["attention"] == (Attention.ALL_GATHER,)
    # Megatron-LM: 1f1b, with chunks interleaved; all levels of ZeRO, three of them by Megatron-FSDP and its optimizer
    assert limits("megatron") == {"schedule": ("1f1b", "interleaved"), "zero": (0, 1, 2, 3)}
    # DeepSpeed knows Ulysses alone, and without ZeRO sums no gradients in fp32 beside parameters in bf16
    assert limits("deepspeed") == {
        "schedule": ("1f1b",),
        "zero": (1, 2, 3),
        "attention": (Attention.ULYSSES,),
        "overlap_gradients": (True, False),
    }
    assert limits("nanotron") == {"schedule": ("gpipe", "1f1b"), "zero": (0, 1)}


def test_limits_that_are_written_stay() -> None:
    accepts = Acceptance("torchtitan", MODELS["llama"])
    space = accepts.limit_space(problem("llama", 4), Space(zero=(1, 3), schedule=("1f1b",)))
    assert (space.zero, space.schedule, space.attention) == ((1, 3), ("1f1b",), (Attention.ALL_GATHER,))


def test_what_no_plan_helps_is_told_from_what_hangs_on_the_plan() -> None:
    of = problem("mixture", 4)
    (never,) = Acceptance("nanotron", MODELS["mixture"]).list_general_reasons(of)
    assert never.startswith("model.experts: none alone")
    assert Acceptance("deepspeed", MODELS["mixture"]).list_general_reasons(of) == ()
    assert (
        Answers(Acceptance("deepspeed", MODELS["mixture"]).list_rules(of)).list_refusals(Layout(pipeline=2), FIELDS)
        == ()
    )


@EACH
def test_a_value_goes_to_other_processes(name: str) -> None:
    accepts = Acceptance(name, MODELS["gpt"])
    assert pickle.loads(pickle.dumps(accepts)) == accepts


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"target is one of .*, met 'megatorn'; nearest: megatron"):
        Acceptance("megatorn", MODELS["gpt"])


@EACH
def test_an_answer_takes_less_than_100_microseconds(name: str) -> None:
    of: Problem = problem("gpt", 16)
    every = list(layouts(of))

    def ask_all() -> None:
        answers = Answers(Acceptance(name, MODELS["gpt"]).list_rules(of))
        for layout in every:
            answers.list_refusals(layout)

    enough = 100e-6 * len(every)
    assert least_cpu(ask_all, enough) < enough


def test_a_request_of_an_operator_plan_is_refused_whole() -> None:
    one = request("gpt", tensor=2)
    cut = replace(one.plan, shardings=one.plan.shardings[1:])
    (reason,) = Acceptance("megatron", one.spec).list_refusals(one.problem, cut)
    assert reason.startswith("plan: what the fields of a plan mean")


def test_every_trainer_has_such_a_file() -> None:
    assert set(GOLDEN) == set(TARGETS)
