"""A module is built once, or once more where it cannot be recorded; its own errors come out as they are."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from builders import list_states
from safetensors.torch import load_file, save_file
from torch import nn

from meshwise.executor.starting.construction import DeferredModule, StartError, WholeModule, start_module


class Program:
    """Builds by a function, and counts how often."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build, self.count = build, 0

    def __call__(self) -> nn.Module:
        self.count += 1
        return self.build()


def raise_value_error() -> nn.Module:
    nn.Linear(2, 2)
    raise ValueError("of the user, on a meta level")


def catch_own_error() -> nn.Module:
    module = nn.Linear(2, 2)
    try:
        module.weight @ torch.zeros(3)
    except RuntimeError:
        nn.init.ones_(module.weight)
    return module


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        (raise_value_error, ValueError, "on a meta level"),
        (lambda: nn.Linear("a", 1), TypeError, "empty"),
        (lambda: nn.Sequential(nn.Linear(2, 2)).weights, AttributeError, "weights"),
        (lambda: torch.zeros(2) @ torch.zeros(3), RuntimeError, "inconsistent tensor size"),
        (lambda: nn.Linear(2, 2).weight.numpy(), RuntimeError, "requires grad"),
        (lambda: 3, StartError, "returns a torch.nn.Module, met int"),
    ],
)
def test_errors_of_a_program_come_out_once(build: Any, kind: type[Exception], message: str) -> None:
    program = Program(build)
    with pytest.raises(kind, match=message) as caught:
        start_module(program, 0)
    assert program.count == 1 and caught.value.__context__ is None


def test_an_error_that_a_program_catches_is_caught() -> None:
    program = Program(catch_own_error)
    start = start_module(program, 0)
    assert isinstance(start, DeferredModule) and program.count == 1
    assert start.build().weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def draw_from_own_generator() -> nn.Module:
    module = nn.Linear(2, 2)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return module


def share_memory() -> nn.Module:
    module = nn.Linear(2, 2)
    module.other = nn.Parameter(module.weight.detach()[:1])
    return module


def ask_for_address() -> nn.Module:
    module = nn.Linear(2, 2)
    assert module.weight.data_ptr()
    return module


def run_forward() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module(torch.randn(8, 3))
    return module


def make_sparse() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.eye(2).to_sparse())
    return module


def copy_bytes() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("bytes", torch.tensor(list(module.weight.untyped_storage())))
    return module


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (draw_from_own_generator, "draws from a generator of its own"),
        (share_memory, "two parameters share memory"),
        (ask_for_address, "asks for the memory of a tensor"),
        (run_forward, "native_batch_norm.default, which may change buffers"),
        (make_sparse, "SparseTensor"),
        (copy_bytes, "NotImplementedError: Not available for 'meta' device type"),
        (lambda: nn.LazyLinear(3), "whose shapes the first batch says"),
    ],
)
def test_what_cannot_be_recorded_is_run_as_it_is(build: Callable[[], nn.Module], reason: str) -> None:
    program = Program(build)
    start = start_module(program, 5)
    assert isinstance(start, WholeModule) and reason in start.reason and program.count == 2
    torch.manual_seed(5)
    expected, found = build(), list_states(start.build())
    for name, tensor in list_states(expected).items():
        assert torch.equal(found[name].to_dense(), tensor.to_dense())


def test_a_refusal_that_a_program_catches_counts() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        try:
            module.weight.data_ptr()
        except Exception:
            return nn.Linear(3, 3)
        return module

    start = start_module(build, 0)
    assert isinstance(start, WholeModule) and start.module.in_features == 2


def test_draws_of_the_caller_stay() -> None:
    for build in (lambda: nn.Linear(2, 2), draw_from_own_generator):
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        start_module(build, 7).build()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_a_program_may_seed_itself() -> None:
    def build(seed: int | None) -> nn.Module:
        if seed is not None:
            torch.manual_seed(seed)
        return nn.Linear(2, 2)

    first, again, other = (start_module(lambda seed=seed: build(seed), 0).build() for seed in (1, 1, 2))
    assert torch.equal(first.weight, again.weight) and not torch.equal(first.weight, other.weight)
    drawn, drawn_other = (start_module(lambda: build(None), seed).build() for seed in (1, 2))
    assert not torch.equal(drawn.weight, drawn_other.weight)


def test_numbers_of_python_and_numpy_are_of_the_seed() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(np.random.randn(2, 2)))
            module.bias.fill_(random.random())
        return module

    first, again, other = (list_states(start_module(build, seed).build()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)


class Promised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def init_weights(self) -> None:
        nn.init.constant_(self.first.weight, 3.0)


def test_what_a_program_puts_on_the_meta_device_is_filled_by_its_methods() -> None:
    def promise(build: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            return build()

    start = start_module(lambda: promise(Promised), 0)
    assert isinstance(start, DeferredModule)
    assert start.build().first.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    plain = start_module(lambda: promise(lambda: nn.Linear(2, 2)), 0).build()
    assert plain.weight.abs().sum() > 0
    with pytest.raises(StartError, match=r"met weight on the meta device; nearest: a method init_weights\(\)"):
        start_module(lambda: promise(draw_from_own_generator), 0)


def test_a_program_sees_the_devices_that_it_asked_for() -> None:
    seen = []

    def build() -> nn.Module:
        module, promised = nn.Linear(2, 2), torch.empty(2, device="meta")
        seen.extend(str(item.device) for item in (module.weight, module.weight[0] * 2, promised, promised + 1))
        seen.extend([module.weight.is_meta, module.weight.is_cpu, module.weight.is_cuda, promised.is_meta])
        if not module.weight.is_meta:  # as programs that leave such tensors to others
            nn.init.ones_(module.weight)
        return module

    start = start_module(build, 0)
    assert isinstance(start, DeferredModule) and start.module.weight.is_meta
    assert seen == ["cpu", "cpu", "meta", "meta", False, True, False, True]
    assert start.build().weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_files_that_are_loaded_are_constants(tmp_path: Path) -> None:
    source = nn.Linear(3, 3)
    torch.save(source.state_dict(), tmp_path / "states")
    save_file(source.state_dict(), tmp_path / "states.safetensors")
    loads = [
        lambda: torch.load(tmp_path / "states"),
        lambda: torch.load(tmp_path / "states", mmap=True),
        lambda: load_file(tmp_path / "states.safetensors"),
    ]

    def build(load: Callable[[], Any], assign: bool) -> nn.Module:
        module, states = nn.Linear(3, 3), load()
        module.load_state_dict(states, assign=assign)
        if not assign:
            states["weight"].zero_()  # what a program does with its own copy does not matter
        return module

    for load in loads:
        for assign in (False, True):
            start = start_module(lambda load=load, assign=assign: build(load, assign), 0)
            assert isinstance(start, DeferredModule) and start.module.weight.is_meta
            assert torch.equal(start.build().weight, source.weight)


def test_tensors_in_caches_of_a_program_have_values() -> None:
    cache: dict[str, torch.Tensor] = {}

    def build(read: bool) -> nn.Module:
        cache.setdefault("table", torch.arange(4.0))
        module = nn.Linear(2, 2)
        if read:
            module.weight.data_ptr()
        return module

    for read in (False, True):
        cache.clear()
        start_module(lambda read=read: build(read), 0).build()
        assert cache["table"].tolist() == [0.0, 1.0, 2.0, 3.0]
