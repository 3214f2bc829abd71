"""Measures collectives between the devices of this machine, one process a device."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.calibration.device_machine import Machine
from meshwise.executor.launch.process_group import find_loopback
from meshwise.executor.recording.private_torch import INTERFACE, all_gather, limit_gloo_workers, reduce_scatter
from meshwise.executor.recording.timer import Run, Timer

TOOL = "torch.distributed, in a row as nccl-tests do"
"""The tool of a row; `meshwise.simulator.calibration` reads from it that the device's clock is around many runs."""
MIN_RUNS, MAX_RUNS = 5, 1000
"""Fewest and most runs in a row."""
ELEMENT_BYTES = 4
"""Bytes of an element."""


@contextmanager
def join_group(folder: Path, device: str, timeout: float) -> Iterator[None]:
    """Run the body in a process group of all ranks: NCCL with a GPU each, or gloo. Waits end after ``timeout`` s."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), num_ranks)  # type: ignore[attr-defined]
    init_group = partial(
        dist.init_process_group, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout)
    )
    if device == "cuda":
        torch.cuda.set_device(rank)
        init_group("nccl", device_id=torch.device("cuda", rank))
    else:
        torch.set_num_threads(1)
        os.environ[INTERFACE] = find_loopback()
        limit_gloo_workers()
        init_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def list_group_sizes(num_ranks: int) -> list[int]:
    """Return the group sizes to measure: powers of 2, and all ranks.

    >>> list_group_sizes(6)
    [2, 4, 6]
    """
    return sorted({2**power for power in range(1, num_ranks.bit_length())} | {num_ranks}) if num_ranks > 1 else []


def measure_collectives(
    messages: Sequence[int], machine: Machine, timer: Timer, seconds: float, note: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield, on rank 0 alone, a row for each collective, group of the first ranks and size, in about ``seconds``.

    Ranks outside a group wait for it.
    """
    rank, sizes = dist.get_rank(), list_group_sizes(dist.get_world_size())
    share = seconds / max(5 * len(sizes) * len(messages), 1)
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            for name, nbytes, run_time in _time_group(group, size, messages, timer, share, note):
                if rank == 0:
                    yield _build_row(machine, name, size, nbytes, run_time)
        dist.barrier()


def _build_row(machine: Machine, name: str, size: int, nbytes: int, seconds: float) -> dict[str, Any]:
    return {
        **machine.fields(),
        "collective": name,
        "n_ranks": size,
        "n_nodes": 1,
        "ranks_per_node": size,
        "intra_node_link": machine.link,
        "dtype": "float",
        "size_bytes": nbytes,
        "time_us": seconds * 1e6,
        "tool": TOOL,
    }


def _time_group(
    group: dist.ProcessGroup,
    size: int,
    messages: Sequence[int],
    timer: Timer,
    share: float,
    note: Callable[[str], None],
) -> Iterator[tuple[str, int, float]]:
    for nbytes in messages:
        elements = nbytes // ELEMENT_BYTES // size * size
        for name, run in build_runs(group, size, elements, timer.device).items():
            note(f"{name} of {nbytes} bytes, {size} ranks")
            run_time = timer.measure_row(run, _agree_count(run, group, timer, share))
            yield name, elements * ELEMENT_BYTES, run_time / 2 if name == "p2p" else run_time


def _agree_count(run: Run, group: dist.ProcessGroup, timer: Timer, share: float) -> int:
    """Return the number of runs that take about ``share`` seconds, the same on all ranks of a group."""
    run()
    num_runs = min(max(ceil(share / max(timer.measure_once(run), 1e-9)), MIN_RUNS), MAX_RUNS)
    shared_count = torch.tensor([num_runs], device=timer.device)
    dist.broadcast(shared_count, 0, group=group)
    return int(shared_count)


def build_runs(group: dist.ProcessGroup, size: int, elements: int, device: str) -> dict[str, Run]:
    """Return the collectives over a buffer of ``elements``.

    The buffer is a rank's own, and of all ranks together where a collective gathers or scatters.
    """
    buffer, output = torch.zeros(2, elements, device=device)
    shard = torch.zeros(elements // size, device=device)
    runs: dict[str, Run] = {
        "all_reduce": partial(dist.all_reduce, buffer, group=group),
        "all_gather": partial(all_gather, buffer, shard, group=group),
        "reduce_scatter": partial(reduce_scatter, shard, buffer, group=group),
        "all_to_all": partial(dist.all_to_all_single, output, buffer, group=group),
    }
    return runs | ({"p2p": partial(_ping_pong, buffer, group)} if size == 2 else {})


def _ping_pong(message: Tensor, group: dist.ProcessGroup) -> None:
    """Send ``message`` to the other of two ranks and receive it back, or receive it and send it back."""
    group_rank = group.rank()
    peer = dist.get_global_rank(group, 1 - group_rank)
    for sender in (0, 1):
        if group_rank == sender:
            dist.send(message, peer, group=group)
        else:
            dist.recv(message, peer, group=group)
