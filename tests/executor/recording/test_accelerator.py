"""What a rank computes on: a core changes nothing, a GPU is asked for what it has, copies wait for what computes."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from contextlib import contextmanager  # noqa: E402

from tiny_jobs import TINY, job  # noqa: E402

from meshwise.executor.device import require_device  # noqa: E402
from meshwise.executor.launch.process_group import join_process_group  # noqa: E402
from meshwise.executor.parallel.offload import HostMemory  # noqa: E402
from meshwise.executor.recording.accelerator import (  # noqa: E402
    CORE,
    Accelerator,
    Copier,
    DeviceMemory,
    Gpu,
    StreamCopier,
    find_accelerator,
)
from meshwise.executor.recording.rank_files import Heartbeat  # noqa: E402
from meshwise.executor.recording.recorder import Recorder  # noqa: E402
from meshwise.executor.training.trainer import Trainer  # noqa: E402
from meshwise.strategies.plan.offloading import offloading  # noqa: E402

GIB = 2**30


@pytest.mark.parametrize("local", ["0", "3", "7"])
def test_a_rank_has_the_gpu_of_its_number_on_its_host(local: str) -> None:
    # rank 11 of two hosts of 8 is number 3 on the second
    found = find_accelerator("cuda", {"LOCAL_RANK": local, "RANK": "11"}.get)
    assert found.device == torch.device("cuda", int(local))
    assert find_accelerator("cpu", {"LOCAL_RANK": local}.get) is CORE


def test_without_a_launcher_a_rank_has_the_first_gpu() -> None:
    assert find_accelerator("cuda", dict[str, str]().get).device == torch.device("cuda", 0)


def test_gpus_have_a_group_of_the_host_beside_nccl() -> None:
    backends = dict(each.split(":") for each in Gpu(0).backend.split(","))
    assert backends == {"cpu": "gloo", "cuda": "nccl"} and CORE.backend == "gloo"


@pytest.mark.parametrize(
    ("ranks", "gpus", "message"),
    [
        (4, 2, "--device: cuda needs 4 GPUs, one for each rank of a host, met 2; nearest: a plan of 2 ranks, or --"),
        (2, 1, "--device: cuda needs 2 GPUs, one for each rank of a host, met 1; nearest: a plan of 1 rank, or --"),
        (1, 0, "--device: cuda needs 1 GPU, one for each rank of a host, met 0; nearest: --device cpu"),
    ],
)
def test_more_ranks_than_gpus_are_refused(ranks: int, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(ValueError) as refused:
        require_device("cuda", ranks)
    assert str(refused.value).startswith(message)
    require_device("cuda", gpus)
    require_device("cpu", 1000)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is asked of ``torch.cuda``, which says figures of 3, 5 and 7 GiB."""
    asked: list[Any] = []

    def noted(name: str, answer: Any = None) -> None:
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *given: (asked.append((name, *given)), answer)[1])

    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        noted(name)
    for name, size in (("memory_allocated", 3), ("max_memory_allocated", 5), ("max_memory_reserved", 7)):
        noted(name, size * GIB)
    noted("get_device_properties", SimpleNamespace(total_memory=141 * GIB))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield asked
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_a_gpu_says_bytes_now_at_the_most_and_taken_from_the_device(cuda: list[Any]) -> None:
    assert Gpu(2).read_memory() == DeviceMemory(3 * GIB, 5 * GIB, 7 * GIB) and Gpu(2).capacity == 141 * GIB
    assert {index for _, index in cuda} == {2}
    assert CORE.read_memory() is None and CORE.capacity is None


def test_a_new_peak_begins_when_the_gpu_is_done_and_holds_nothing_besides(cuda: list[Any]) -> None:
    Gpu(1).reset_peak()
    assert cuda == [("synchronize", 1), ("empty_cache",), ("reset_peak_memory_stats", 1)]


def test_ranks_share_the_cores_of_their_host(cuda: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    Gpu(5).claim_device(8)
    assert cuda == [("set_device", 5)] and torch.get_num_threads() == 16 // 8


@pytest.mark.parametrize("exact", [True, False])
def test_fp32_has_its_digits_and_fp64_is_computed_each_time_alike(exact: bool, cuda: list[Any]) -> None:
    Gpu(0).settle(exact=exact)
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert torch.are_deterministic_algorithms_enabled() is exact


class _Apart(Accelerator):
    """A core whose device has memory of its own, without bytes."""

    device = torch.device("meta")


def test_what_torch_has_put_on_the_host_is_counted_once_and_stays(tmp_path: Path) -> None:
    host = HostMemory(Recorder(Heartbeat(tmp_path, 0)), _Apart())
    shard = torch.zeros(10, dtype=torch.float32)
    assert (
        host.holds(shard)
        and host.ensure_on_host(shard) is shard
        and host.ensure_on_host(shard[2:]).data_ptr() == shard[2:].data_ptr()
    )
    assert host.peak_bytes == 40
    assert host.bring_to_device(shard).is_meta and host.bring_to_device(shard.to("meta")).is_meta
    assert not host.holds(shard.to("meta"))


class _Late:
    """Copies nothing before it is waited for, as a stream that is late."""

    def copy(self, source: Any, target: Any) -> Any:
        return lambda: target.copy_(source)

    def wait(self, copy_event: Any) -> None:
        copy_event()


class _LateCore(Accelerator):
    def copier(self) -> Any:
        return _Late()

    def host_bytes(self, size: int) -> Any:
        room = super().host_bytes(size)
        room.fill(0xFF)  # not a number
        return room


def test_activations_are_read_when_their_copies_have_come_however_late(tmp_path: Path) -> None:
    plain = job(TINY, microbatch=2, global_batch=4)
    away = job(TINY, microbatch=2, global_batch=4, offload=offloading(["activations"]))
    found = []
    with join_process_group(tmp_path, 60.0):
        for each, accelerator in ((plain, CORE), (away, _LateCore())):
            trainer = Trainer(each, Recorder(Heartbeat(tmp_path, 0)), accelerator)
            found.append((trainer.step(0), [parameter.grad.clone() for parameter in trainer.parameters]))
        assert trainer.host.peak_bytes > 0
    (loss, gradients), (other, others) = found
    assert loss == other
    torch.testing.assert_close(gradients, others, rtol=0, atol=0)


class _Stream:
    """A stream that notes what is asked of it."""

    def __init__(self, name: str, asked: list[Any]) -> None:
        self.name, self.asked = name, asked

    def wait_stream(self, other: "_Stream") -> None:
        self.asked.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        return f"end of {self.name}"

    def wait_event(self, event: str) -> None:
        self.asked.append((self.name, "waits for", event))


class _Tensor(SimpleNamespace):
    def copy_(self, source: Any, non_blocking: bool) -> None:
        self.asked.append(("copy", source.name, self.name, non_blocking))


def test_each_direction_has_a_stream_that_waits_for_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    names = iter(("outward", "inward"))
    computing = _Stream("computing", asked)

    @contextmanager
    def on(stream: _Stream) -> Any:
        asked.append(("on", stream.name))
        yield

    monkeypatch.setattr("torch.cuda.Stream", lambda device: _Stream(next(names), asked))
    monkeypatch.setattr("torch.cuda.current_stream", lambda: computing)
    monkeypatch.setattr("torch.cuda.stream", on)
    streams = StreamCopier(torch.device("cuda", 0))
    device, host = (_Tensor(name=name, asked=asked, is_cuda=name == "device") for name in ("device", "host"))
    streams.wait(streams.copy(device, host))
    streams.wait(streams.copy(host, device))
    assert asked == [
        ("outward", "waits for", "computing"),
        ("on", "outward"),
        ("copy", "device", "host", True),
        ("computing", "waits for", "end of outward"),
        ("inward", "waits for", "computing"),
        ("on", "inward"),
        ("copy", "host", "device", True),
        ("computing", "waits for", "end of inward"),
    ]


def test_a_core_copies_in_step() -> None:
    source, target = torch.arange(3.0), torch.zeros(3)
    copier = Copier()
    copier.wait(copier.copy(source, target))
    assert target.tolist() == [0.0, 1.0, 2.0]
