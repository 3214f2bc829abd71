"""Measures a user's module on this machine for a few seconds, on all ranks at once: `measure_module`.

Nothing here is a plan that a run would have: passes are those of one rank, and what torch's parts for several ranks
take besides, `DistributedDataParallel` and `fully_shard`, is measured in a group of this rank alone. Messages are
measured apart. A prediction puts them together as the plan says.
"""

import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise.executor.calibration.figures import MESSAGES
from meshwise.executor.calibration.measures import build_own_mesh, measure_collectives, measure_mean, measure_times
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.module_measures.block_clock import BlockClock
from meshwise.executor.module_measures.cut_program import CutProgram, build_rank_mesh, count_operator_ranks
from meshwise.executor.module_measures.figures import (
    BlockFigures,
    CollectiveRow,
    CutFigures,
    ModuleFigures,
    figures_file,
    read_start,
)
from meshwise.executor.module_measures.source import ModuleSource, read_source
from meshwise.executor.modules.batch_norms import normalise_globally
from meshwise.executor.modules.batches import count_samples, list_tensors, select_samples
from meshwise.executor.modules.blocks import list_blocks
from meshwise.executor.modules.courses import RenewedBuffers, list_own_units
from meshwise.executor.modules.layout import ModuleLayout, find_cut_axes, list_operator_axes, read_cut_words
from meshwise.executor.modules.losses import (
    LossError,
    compute_own_loss,
    find_loss_kind,
    list_batch_norms,
    require_mean_over_samples,
)
from meshwise.executor.modules.optimizers import make_adamw
from meshwise.executor.modules.probe import Findings, probe
from meshwise.executor.modules.quiet import keep_draws
from meshwise.executor.modules.sharding import act_alone, find_precision_context, shard_units
from meshwise.executor.modules.step import TrainingStep
from meshwise.executor.recording.accelerator import find_accelerator
from meshwise.executor.recording.private_torch import make_own_store
from meshwise.executor.recording.rank_files import Heartbeat, UserError
from meshwise.executor.recording.tensor_memory import count_bytes, record_tensor_peak
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.training import load_source
from meshwise.strategies.plan.plan import Plan

FEWER = 4
"""The larger number of samples of a pass over the smaller one, where it is large enough."""
SHARES = 20
"""Measurements into which the time is divided."""
SHORTEST_RUNS = 3
"""Passes of a measurement at least."""
LOOPS = 60
"""Steps of nothing, by which the seconds of a step besides its passes are known."""
MOST_MESSAGES = 30
"""Messages of a size at most: between two of them a rank computes, which takes longer than small ones."""
FEWEST_CUT_SAMPLES = 2
"""Samples of a microbatch whose operators are cut, at least."""
WAIT = 0.02
"""Seconds between two looks for the file that has ranks begin."""


def measure_rank(path: Path, rank: int, seconds: float) -> None:
    """Measure the module of a job for about ``seconds`` on this rank; figures go beside the job.

    It begins when the file of `start_file` is there, so that ranks can be started while their command is still busy.
    """
    job, folder = TrainJob.read(path), path.parent
    heartbeat = Heartbeat(folder, rank)
    heartbeat.beat("start")
    accelerator, user_file = find_accelerator(job.device), load_source(job)
    with join_process_group(folder, job.timeout, accelerator):
        while (plans := read_start(folder)) is None:
            heartbeat.beat("waiting")
            time.sleep(WAIT)
        heartbeat.beat("reading batches")
        source = read_source(job, user_file, accelerator.device, rank, dist.get_world_size())
        Measurement(source, seconds, heartbeat.beat, plans).run().write(figures_file(folder, rank))


def measure_module(source: ModuleSource, seconds: float, plans: Sequence[Plan] = ()) -> ModuleFigures:
    """Return what a module takes, measured for about ``seconds`` on all ranks of this process group together.

    Plans have the operators cut over some of the ranks. Random draws are as before afterwards. Without a process group
    this process is the only rank.
    """
    numpy_draws, own_draws = np.random.get_state(), random.getstate()
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("gloo", store=make_own_store(), rank=0, world_size=1)
    try:
        with keep_draws():
            return Measurement(source, seconds, plans=plans).run()
    finally:
        if is_alone:
            dist.destroy_process_group()
        np.random.set_state(numpy_draws)
        random.setstate(own_draws)


def measure_loop() -> float:
    """Return the seconds of a step besides passes, optimizer and messages, by a module of one weight in one process."""
    module, inputs = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    plain = nn.Linear(1, 1, bias=False)
    optimizer = make_adamw(1e-3)(plain)
    differences = []
    with act_alone():
        step = TrainingStep(
            module,
            ModuleLayout(),
            optimizer=make_adamw(1e-3),
            loss=lambda outputs, batch: outputs.mean(),
            device=torch.device("cpu"),
        )
        for _ in range(LOOPS):
            start = time.perf_counter()
            step(inputs)
            turn = time.perf_counter()
            plain(inputs).mean().backward()
            optimizer.step()
            plain.zero_grad(set_to_none=True)
            differences.append((turn - start) - (time.perf_counter() - turn))
    return max(median(differences[1:]), 0.0)


class _MessageWatch(TorchDispatchMode):
    """Sees whether its body exchanges messages between ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_messages = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self.has_messages = self.has_messages or function.namespace in ("c10d", "_c10d_functional")
        return function(*args, **(kwargs or {}))


class Measurement:
    """The measurement of one module, on this rank together with all others.

    Parameters
    ----------
    plans
        Those whose cut operators are measured too, each for another number of ranks.
    """

    def __init__(
        self,
        source: ModuleSource,
        seconds: float,
        note: Callable[[str], None] = lambda text: None,
        plans: Sequence[Plan] = (),
    ) -> None:
        self.source, self.seconds, self.note, self.plans = source, seconds, note, plans
        self.device, self.batch = source.device, source.batch
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()

    def run(self) -> ModuleFigures:
        """Return the figures."""
        self.note("module")
        loop = measure_loop()
        module = self.source.build()
        blocks = list_blocks(module)
        findings = self._find(module, blocks)
        self._require_silence(module)
        norms = list_batch_norms(module)
        whole_batch, whole_microbatch = self._find_mixing(module), self._find_renewal(module, 2)
        whole_batch = whole_batch or self._find_renewal(module, 1)
        if norms:
            whole_microbatch = f"{norms[0][0]} takes statistics over a batch"
        fewer, more = self._choose_samples(module)
        self.note("passes alone")
        alone = self._measure_alone(module, more)
        if norms and self.num_ranks > 1:
            normalise_globally(module)
        self.note("passes")
        passes = [self._measure_passes(module, number) for number in (fewer, more)]
        head, parts, tail = self._measure_blocks(module, list(findings.steady_blocks), more)
        kept_batch = select_samples(self.batch, 0, more)
        peak = self._record_peak(partial(self._run_passes_and_keep, module, kept_batch))
        self.note("optimizer")
        optimizer = self.source.build_optimizer(module)
        update = self._measure(optimizer.step)
        state = count_bytes(
            value for states in optimizer.state.values() for value in states.values() if isinstance(value, Tensor)
        )
        launches = self._measure(_build_tiny_update(optimizer))
        update_peak = self._record_peak(optimizer.step)
        module.zero_grad(set_to_none=True)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        replica = unit = sharded_update = reduction = 0.0
        rows: list[CollectiveRow] = []
        units = len(list_own_units(findings.steady_blocks, module)) + 1
        whole_states = _find_whole_states(findings, blocks, trained)
        if self.num_ranks > 1:
            self.note("torch's parts for several ranks")
            plain = self.source.build() if norms else module  # those have statistics of all ranks by now
            replica = self._measure_difference(plain, self._build_replica(findings.has_unused), fewer)
            if not whole_states:
                sharded = self._build_shards(blocks, findings)
                unit = self._measure_difference(plain, sharded, fewer) / units
                sharded_optimizer = self.source.build_optimizer(sharded)
                self._run_passes_and_keep(sharded, kept_batch)
                sharded_update = self._measure(sharded_optimizer.step) - update
            self.note("messages")
            reduction = self._measure(self._reduce_losses)
            largest = max(count_bytes(trained), more * max((part.output for part in parts), default=0.0))
            rows = self._measure_messages(largest)
            self.note("cut operators")
        cuts = tuple(self._measure_cuts(more))
        return ModuleFigures(
            samples=(fewer, more),
            passes=(passes[0], passes[1]),
            alone=alone,
            head=head,
            blocks=tuple(parts),
            tail=tail,
            buffers=count_bytes((*module.buffers(), *frozen)),
            batch=count_bytes(list_tensors(self.batch)) / count_samples(self.batch),
            peak=peak,
            update=update,
            update_launches=min(launches, update),
            update_peak=update_peak,
            state=state,
            reading=self.source.reading,
            read_samples=self.source.read_samples,
            loop=loop,
            reduction=reduction,
            replica=replica,
            units=units,
            unit=unit,
            sharded_update=max(sharded_update, 0.0),
            whole_batch=whole_batch,
            whole_microbatch=whole_microbatch,
            whole_states=whole_states,
            collectives=tuple(rows),
            cuts=cuts,
        )

    def _find(self, module: nn.Module, blocks: list[nn.Module]) -> Findings:
        with find_precision_context(module, self.device, self.source.precision):
            kind = find_loss_kind(module, self.batch, self.source.loss)
            return probe(module, blocks, self.batch, self.source.loss, self.device, kind)

    def _find_mixing(self, module: nn.Module) -> str:
        try:
            with find_precision_context(module, self.device, self.source.precision):
                tolerance = 2e-2 if self.source.precision == "bf16" else None
                kind = find_loss_kind(module, self.batch, self.source.loss)
                require_mean_over_samples(module, self.batch, self.source.loss, tolerance, kind)
        except LossError as error:
            return str(error)
        return ""

    def _require_silence(self, module: nn.Module) -> None:
        """Raise `UserError` where forward exchanges messages itself, so that a rank cannot run it alone."""
        with _MessageWatch() as watch:
            self._run_passes(module, self.batch)
        if watch.has_messages:
            rule = "a module that is measured runs on each rank alone, met messages between ranks in its forward"
            raise UserError(f"{rule}; nearest: --plan data={self.num_ranks}")

    def _find_renewal(self, module: nn.Module, num_microbatches: int) -> str:
        """Return why forward renews a buffer so that ranks or microbatches would have others, or nothing."""
        renewed = RenewedBuffers(module)
        self._run_passes(module, self.batch)
        try:
            renewed.require_equal(num_microbatches)
        except LossError as error:
            return str(error)
        return ""

    def _choose_samples(self, module: nn.Module) -> tuple[int, int]:
        """Return two numbers of samples with which passes take a reasonable part of the time."""
        most = count_samples(self.batch)
        self._run_passes(module, self.batch)
        start = time.perf_counter()
        self._run_passes(module, self.batch)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        limit = self.seconds / SHARES / SHORTEST_RUNS
        more = max(int(most * min(limit / float(seconds), 1.0)), min(most, 2))
        return max(more // FEWER, 1 if not list_batch_norms(module) else min(more, 2)), more

    def _run_passes(self, module: nn.Module, batch: Any) -> None:
        with find_precision_context(module, self.device, self.source.precision):
            loss = compute_own_loss(module, batch, self.source.loss)
        loss.total.backward()  # type: ignore[no-untyped-call]
        module.zero_grad(set_to_none=True)
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _measure(self, run: Callable[[], Any]) -> float:
        """Return the median seconds of ``run`` on the slowest rank, run equally often on every rank."""

        def run_to_end() -> None:
            run()
            self._wait()

        times = measure_times(run_to_end, self.seconds / SHARES, least=SHORTEST_RUNS)
        return self._find_slowest(median(times))

    def _find_slowest(self, seconds: float) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _measure_passes(self, module: nn.Module, samples: int) -> float:
        return self._measure(partial(self._run_passes, module, select_samples(self.batch, 0, samples)))

    def _measure_alone(self, module: nn.Module, samples: int) -> float:
        """Return the seconds of passes on rank 0 while others wait; they are no different with one rank."""
        batch = select_samples(self.batch, 0, samples)
        times: list[float] = []
        dist.barrier()
        end = time.perf_counter() + self.seconds / SHARES
        while self.rank == 0 and (len(times) < SHORTEST_RUNS or time.perf_counter() < end):
            start = time.perf_counter()
            self._run_passes(module, batch)
            times.append(time.perf_counter() - start)
        dist.barrier()
        return self._find_slowest(median(times) if times else 0.0)

    def _measure_blocks(
        self, module: nn.Module, blocks: list[nn.Module], samples: int
    ) -> tuple[BlockFigures, list[BlockFigures], BlockFigures]:
        """Return what is before, in and after blocks; nothing is in blocks where there are none."""
        batch, clock = select_samples(self.batch, 0, samples), BlockClock(module, blocks, self._wait)
        rows = [self._time_blocks(module, batch, clock) for _ in range(SHORTEST_RUNS)]
        forward, backward = (
            [median(column) for column in zip(*(row[place] for row in rows), strict=True)] for place in (0, 1)
        )
        paths = {id(part): path for path, part in module.named_modules()}
        chain = [paths[id(blocks[place])] for place in clock.order]
        names, shapes = ["", *chain, ""], _divide_parameters(module, [blocks[place] for place in clock.order])
        order = [-1, *clock.order]
        outputs = {place: clock.results.get(place, (0, 0)) for place in clock.order}
        results = {storage for storage, _ in outputs.values()}
        parts = []
        tail = len(order)
        for number, name in enumerate(names):
            place = order[number] if number < tail else -2
            own = [size for storage, (saver, size) in clock.saved.items() if storage not in results and saver == place]
            parts.append((number, name, sum(own)))
        # what is saved outside blocks counts after them, where its bytes are needed at the same time as all others
        outside = parts[0][2]
        first_input = clock.results.get(clock.order[0], (0, 0))[1] if clock.order else 0
        figures = []
        for number, name, size in parts:
            is_tail, is_head = number == tail, number == 0
            result = first_input if is_head else outputs[order[number]][1] if not is_tail else 0
            source = outputs.get(order[number - 1]) if number > 1 else None
            figures.append(
                BlockFigures(
                    path=name,
                    forward=forward[number],
                    backward=backward[number],
                    saved=(outside if is_tail else 0 if is_head else size) / samples,
                    output=result / samples,
                    saves_input=source is None or source[0] in clock.saved,
                    shapes=shapes[number] if number < tail else (),
                )
            )
        return figures[0], figures[1:-1], figures[-1]

    def _time_blocks(self, module: nn.Module, batch: Any, clock: BlockClock) -> tuple[list[float], list[float]]:
        """Return the seconds of forward and backward before, in and after blocks."""
        with clock.watch():
            start = time.perf_counter()
            with find_precision_context(module, self.device, self.source.precision):
                loss = compute_own_loss(module, batch, self.source.loss)
            self._wait()
            turn = time.perf_counter()
            loss.total.backward()  # type: ignore[no-untyped-call]
            self._wait()
            end = time.perf_counter()
        module.zero_grad(set_to_none=True)
        if not clock.order:
            return [turn - start, 0.0], [end - turn, 0.0]
        own = [clock.forward[place] for place in clock.order]
        before = clock.starts[clock.order[0]] - start
        forward = [before, *own, max(turn - start - before - sum(own), 0.0)]
        # gradients come to the last block first; a block without one has no backward of its own
        marks, latest = [], turn
        for place in reversed(clock.order):
            latest = max(clock.gradients.get(place, latest), latest)
            marks.append(latest)
        spans = [later - earlier for earlier, later in zip(marks, [*marks[1:], end], strict=True)]
        return forward, [0.0, *reversed(spans), marks[0] - turn]

    def _measure_cuts(self, samples: int) -> Iterator[CutFigures]:
        """Yield the figures of programs of cut operators, of which a group has as many samples as its ranks."""
        for plan in self.plans:
            num_ranks = count_operator_ranks(plan)
            if num_ranks == 1 or self.num_ranks % num_ranks:
                continue
            ranks = build_rank_mesh(plan, self.device)
            more = samples * num_ranks
            axes = find_cut_axes(list_operator_axes(plan))
            fewer = max(more // FEWER, FEWEST_CUT_SAMPLES)
            fewer += -fewer % read_cut_words(axes).get("expert", 1)  # they have samples of their own elsewhere
            try:
                programs = [CutProgram(self.source, plan, ranks, number) for number in (fewer, more)]
            except ValueError:  # on all ranks alike; a run of such a plan is refused with the reason
                continue
            passes = [self._measure(program.run) for program in programs]
            messages = [-self._find_slowest(-median(program.messages)) for program in programs]
            peak = self._record_peak(programs[1].run, keeps_results=False)
            yield CutFigures(axes, (fewer, more), (passes[0], passes[1]), (messages[0], messages[1]), peak)

    def _record_peak(self, run: Callable[[], Any], *, keeps_results: bool = True) -> float:
        """Return the most bytes of tensors while something runs, above those before."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            run()
            return float(torch.cuda.max_memory_allocated(self.device) - before)
        with record_tensor_peak(keeps_results=keeps_results) as peak:
            run()
        return float(peak.size)

    def _run_passes_and_keep(self, module: nn.Module, batch: Any) -> None:
        """Run both passes, and keep gradients for an optimizer."""
        with find_precision_context(module, self.device, self.source.precision):
            loss = compute_own_loss(module, batch, self.source.loss)
        loss.total.backward()  # type: ignore[no-untyped-call]

    def _measure_difference(self, plain: nn.Module, changed: nn.Module, samples: int) -> float:
        """Return by how many seconds passes of a changed module are longer, run by turns with those of a plain one."""
        batch = select_samples(self.batch, 0, samples)
        times: list[float] = []

        def run_both() -> None:
            start = time.perf_counter()
            self._run_passes(plain, batch)
            turn = time.perf_counter()
            self._run_passes(changed, batch)
            times.append((time.perf_counter() - turn) - (turn - start))

        measure_times(run_both, 2 * self.seconds / SHARES, least=SHORTEST_RUNS)
        return self._find_slowest(max(median(times[2:]), 0.0))  # the first two are slow

    def _build_replica(self, has_unused: bool) -> nn.Module:
        ids = [self.device.index] if self.device.type == "cuda" else None
        groups = [dist.new_group([rank]) for rank in range(self.num_ranks)]
        return DistributedDataParallel(
            self.source.build(), device_ids=ids, process_group=groups[self.rank], find_unused_parameters=has_unused
        )

    def _build_shards(self, blocks: list[nn.Module], findings: Findings) -> nn.Module:
        """Return the module whose parameters ``fully_shard`` has cut for one rank."""
        module = self.source.build()
        steady_ids = set(map(id, findings.steady_blocks))
        own_blocks = [own for own, block in zip(list_blocks(module), blocks, strict=True) if id(block) in steady_ids]
        mesh = build_own_mesh(self.device.type)
        shard_units((*list_own_units(own_blocks, module), module), mesh=mesh)
        return module

    def _reduce_losses(self) -> None:
        """Exchange what ranks add up beside gradients, as a step does."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        sums.tolist()
        extremes = torch.zeros(4, dtype=torch.float64, device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        extremes.tolist()

    def _measure_message(self, share: float, run: Callable[[], Any]) -> float:
        def run_to_end() -> None:
            run()
            self._wait()

        return measure_mean(run_to_end, share, MOST_MESSAGES)

    def _measure_messages(self, largest: float) -> list[CollectiveRow]:
        """Return the times of messages of up to the largest size that a plan has, or the next one."""
        sizes = [size for size in range(2, self.num_ranks + 1) if self.num_ranks % size == 0]
        messages = choose_messages(largest)
        share = 4 * self.seconds / SHARES / (len(sizes) * 3 * len(messages))
        rows: list[CollectiveRow] = []
        for size in sizes:
            rows += measure_collectives(size, partial(self._measure_message, share), self.device.type, messages)
        every_rank: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(every_rank, rows)
        return [row for rank_rows in every_rank for row in rank_rows]


def choose_messages(largest: float) -> tuple[int, ...]:
    """Return the bytes of messages to measure: every second of all sizes, from the least on, and the largest.

    >>> choose_messages(2e5)
    (1024, 16384, 262144)
    >>> choose_messages(1e9)
    (1024, 16384, 262144, 4194304, 16777216)
    """
    end = next((place for place, size in enumerate(MESSAGES) if size >= largest), len(MESSAGES) - 1)
    return tuple(size for place, size in enumerate(MESSAGES[: end + 1]) if place == end or place % 2 == 0)


def _find_whole_states(findings: Findings, blocks: list[nn.Module], trained: list[nn.Parameter]) -> str:
    """Return why ``fully_shard`` would be refused or might be, or nothing."""
    if len({parameter.dtype for parameter in trained}) > 1:
        return "parameters are of several dtypes"
    if findings.has_unused or len(findings.steady_blocks) < len(blocks):
        return "what the module runs depends on its data"
    return ""


def _divide_parameters(module: nn.Module, chain: list[nn.Module]) -> list[tuple[tuple[int, ...], ...]]:
    """Return the shapes of trained parameters outside blocks, and of each block, every parameter once."""
    inside = [list(block.parameters()) for block in chain]
    block_ids = {id(parameter) for row in inside for parameter in row}
    outside = [parameter for parameter in module.parameters() if id(parameter) not in block_ids]
    seen: set[int] = set()
    result = []
    for row in (outside, *inside):
        own = [parameter for parameter in row if parameter.requires_grad and id(parameter) not in seen]
        seen |= set(map(id, own))
        result.append(tuple(tuple(parameter.shape) or (1,) for parameter in own))
    return result


def _build_tiny_update(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the step of an optimizer of the same class on as many parameters of one element each."""
    parameters = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tiny = nn.Parameter(torch.ones(1, 1, device=parameter.device))
            tiny.grad = torch.ones_like(tiny)
            parameters.append(tiny)
    try:
        known_options = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known_options}
        tiny_optimizer = type(optimizer)(parameters, **options)
        tiny_optimizer.step()
    except Exception:  # an optimizer of the user's own: all of its time then counts by the element
        return lambda: None
    return tiny_optimizer.step
