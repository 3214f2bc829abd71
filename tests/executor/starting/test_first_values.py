"""First values are those of the program run with values, whole and in parts, for layers and inits of many kinds."""

import pytest

pytest.importorskip("torch")
import torch
from builders import INITS, LAYERS, PLAIN, Module, build_seeded, list_states
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwise.executor.starting.construction import DeferredModule, start_module
from meshwise.executor.starting.first_values import RecordedValues

PROGRAMS = st.tuples(
    st.lists(st.sampled_from([*INITS, PLAIN]), max_size=5), st.lists(st.sampled_from(sorted(LAYERS)), max_size=2)
)


def start(program: tuple[list[str], list[str]], seed: int = 0) -> tuple[DeferredModule, RecordedValues]:
    start = start_module(lambda: Module(*program), seed)
    assert isinstance(start, DeferredModule), start
    assert isinstance(start.values, RecordedValues)
    return start, start.values


@given(PROGRAMS, st.integers(0, 3))
@settings(max_examples=50)
def test_values_are_those_of_the_program_run_with_values(program: tuple[list[str], list[str]], seed: int) -> None:
    deferred, values = start(program, seed)
    expected = build_seeded(lambda: Module(*program), values.tape)
    names = [name for name, _ in deferred.module.named_parameters()]
    assert names == [name for name, _ in expected.named_parameters()]  # tied ones have one name
    assert all(parameter.is_meta for parameter in deferred.module.parameters())
    found = list_states(deferred.module) | {name: values.read(name) for name in reversed(names)}
    for states in (found, list_states(deferred.build())):
        for name, tensor in list_states(expected).items():
            assert states[name].dtype == tensor.dtype and torch.equal(states[name], tensor), name


@given(PROGRAMS, st.data())
@settings(max_examples=40)
def test_a_part_is_that_of_the_whole(program: tuple[list[str], list[str]], data: st.DataObject) -> None:
    deferred, values = start(program)
    whole = list_states(start(program)[0].build())  # of another recording, as another rank has it
    name, parameter = data.draw(st.sampled_from(list(deferred.module.named_parameters())))
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in parameter.shape]
    part = values.read_part(name, [first for first, _ in ends], [end - first for first, end in ends])
    assert torch.equal(part, whole[name][tuple(slice(*pair) for pair in ends)])
    assert part.untyped_storage().nbytes() == part.nbytes  # the whole is freed


@pytest.mark.parametrize("kind", sorted(INITS))
def test_every_init_changes_values(kind: str) -> None:
    plain, changed = (list_states(start((inits, []))[0].build()) for inits in ([PLAIN], [kind]))
    equal = [torch.equal(plain[name], changed[name]) for name in plain.keys() & changed.keys()]
    assert plain.keys() != changed.keys() or not all(equal)


def test_digests_are_equal_for_equal_values_alone() -> None:
    programs = [(["kaiming"], []), (["orthogonal"], []), (["kaiming"], ["table"])]
    digests = [start(program)[1].compute_digest() for program in programs]
    assert len(set(digests)) == len(programs)
    assert digests == [start(program)[1].compute_digest() for program in programs]
    assert start(programs[0], seed=1)[1].compute_digest() != digests[0]
    constants = [start_module(lambda value=value: fill(value), 0) for value in (1.0, 2.0)]
    assert len({item.values.compute_digest() for item in constants if isinstance(item, DeferredModule)}) == 2


def fill(value: float) -> nn.Module:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.bias.copy_(torch.tensor([value, 0.0]))
    return module
