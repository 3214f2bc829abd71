"""How many ranks every axis of a row has, and what its batch is cut into."""

import re
from typing import NamedTuple

from scenarios.rows.frameworks import is_xla
from scenarios.rows.row import Row, Skip
from scenarios.schema import MAX_BATCH, MAX_DEVICES, MAX_SEQUENCE


class Degrees(NamedTuple):
    """Ranks along each axis."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    chunks: int

    @property
    def devices(self) -> int:
        """Ranks in all."""
        return self.data * self.tensor * self.pipeline * self.context


class Batch(NamedTuple):
    """Sequences of a step, and of one microbatch where that is known."""

    total: int
    micro: int | None


def degrees(row: Row) -> Degrees:
    """Return the degrees of a row; what is missing follows from the number of devices."""
    axes = {name: row.count(name, MAX_DEVICES) for name in ("tp", "pp", "cp")}
    for name, degree in axes.items():
        if degree is None:
            row.assume(f"{name} 1 (not stated)")
    tensor, pipeline, context = (degree or 1 for degree in axes.values())
    devices = row.count("n_devices", MAX_DEVICES)
    data = row.optional("dp", MAX_DEVICES) if devices else row.count("dp", MAX_DEVICES)
    others = tensor * pipeline * context
    if devices is None:
        if data is None:
            raise Skip("n_devices is not stated, and neither is dp")
        devices = data * others
        row.assume(f"n_devices {devices} (not stated; dp * tp * pp * cp)")
    if devices % others:
        raise Skip(f"tp({tensor}) * pp({pipeline}) * cp({context}) = {others} divides n_devices, met {devices}")
    if data is None:
        row.assume(f"dp {devices // others} (not stated; n_devices / (tp * pp * cp))")
    elif data * others != devices:
        row.assume(f"dp {devices // others}: the stated {data} * {others} are not n_devices({devices})")
    data = devices // others
    return Degrees(data, tensor, pipeline, context, row.count("ep", MAX_DEVICES) or 1, _chunks(row, pipeline))


def _chunks(row: Row, pipeline: int) -> int:
    chunks = row.count("vpp", 1000)
    if chunks is None and pipeline > 1:
        row.assume("vpp 1 (not stated)")
    return (chunks or 1) if pipeline > 1 else 1


def sequence(row: Row, fixed: bool) -> int:
    """Return the tokens of a sequence; ``fixed`` where samples have a size of their own."""
    length = row.count("seq_len", MAX_SEQUENCE)
    if length is None and not fixed:
        tokens, samples = row.number("tokens_per_s_per_device"), row.number("samples_per_s_per_device")
        if tokens is None or samples is None:
            raise Skip("seq_len is not stated")
        length = min(max(1, round(tokens / samples)), MAX_SEQUENCE)
        row.assume(f"seq_len {length} (not stated; tokens over samples a second)")
    return length or 1


def batch(row: Row, at: Degrees, length: int) -> Batch:
    """Return the batch of a row, from whichever of its fields say it."""
    accumulated = row.count("grad_accum", MAX_BATCH)
    total = None if "token" in row.text("global_batch") else row.count("global_batch", MAX_BATCH)
    micro = row.number("micro_batch")
    if micro is not None and total is not None:
        micro = _of_data_rank(row, at, micro, accumulated, total)
    if total is None:
        total = _total(row, at, length, micro, accumulated)
    if micro is None and accumulated is not None:
        micro = max(1.0, total / (at.data * accumulated))
        row.assume(f"micro_batch {micro:g} (not stated; global_batch / (dp * grad_accum))")
    if micro is not None and micro >= 1 and not micro.is_integer():
        row.assume(f"micro_batch {round(micro)}, for {micro:g} is no whole number")
    return Batch(total, None if micro is None else max(1, round(micro)))


def _of_data_rank(row: Row, at: Degrees, micro: float, accumulated: int | None, total: int) -> float:
    """Return the sequences of a microbatch that a data rank has, where a row counts those of a device.

    MaxText counts sequences a chip (``per_device_batch_size``): tensor ranks have those of all of them together.
    """
    a_device, a_rank = (micro * ranks * (accumulated or 1) for ranks in (at.devices, at.data))
    if at.pipeline > 1 or (accumulated is None and not is_xla(row)):
        return micro
    if a_rank == total or a_device != total:
        return micro
    whole = micro * at.devices / at.data
    row.assume(f"micro_batch {whole:g}, for {micro:g} a device make the global_batch({total})")
    return whole


def _total(row: Row, at: Degrees, length: int, micro: float | None, accumulated: int | None) -> int:
    tokens = row.number("global_batch" if "token" in row.text("global_batch") else "global_batch_tokens")
    if tokens is not None:
        total = max(1, round(tokens / length))
    elif micro is not None:
        total = max(1, round(micro * at.data * (accumulated or 1)))
    else:
        total = _from_speed(row, at, length)
    row.assume(f"global_batch {total} (not stated; from the other fields)")
    return min(total, MAX_BATCH)


def _from_speed(row: Row, at: Degrees, length: int) -> int:
    step, samples = row.number("step_time_s"), row.number("samples_per_s_per_device")
    tokens = row.number("tokens_per_s_per_device")
    rate = samples or (tokens / length if tokens else None)
    if step is None or rate is None:
        raise Skip("global_batch is not stated, and neither are micro_batch and grad_accum")
    return max(1, round(step * rate * at.devices))


def fraction_of_sequence(row: Row) -> int:
    """Return how many ranks share one sequence where a microbatch is less than one."""
    micro = row.number("micro_batch")
    if micro is None or micro >= 1:
        return 1
    return max(1, round(min(1 / micro, 1024)))


def shards(row: Row, at: Degrees, zero: int) -> int:
    """Return over how many neighbouring data ranks states are shared: 0 for all of them."""
    stated = row.optional("fsdp_shards", MAX_DEVICES)
    words = row.text("plan_note", "schedule", "framework")
    if stated is None and zero and re.search(r"hsdp|hybrid[- _]shard|\bmics\b", words):
        stated = min(row.count("devices_per_node") or 8, at.data)
        row.assume(f"fsdp_shards {stated} (hybrid sharding, number not stated: one node)")
    if stated is None or not zero:
        return 0
    own = stated // at.context if stated % at.context == 0 else stated
    return own if 1 < own < at.data else 0
