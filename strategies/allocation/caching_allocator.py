"""torch's caching allocator: how many bytes it reserves for a series of allocations and releases.

Sizes are rounded up to 512 bytes. Requests up to 1 MiB are served from segments of 2 MiB, larger ones up to 10 MiB from
segments of 20 MiB, and others from segments of their own size, rounded up to 2 MiB. Of all free blocks of its pool that
are large enough, a request gets the smallest, of several the one with the lowest address. The rest of a block becomes a
block of its own if it has 512 bytes, or more than 1 MiB among large blocks; a released block joins its free neighbours.
Small and large blocks and the blocks of every stream are pools of their own. Where the device has no room for a
segment, all segments that are free as a whole are given back first, and then the request fails [1]_.

With expandable segments a pool is one range that grows by pages of 2 or 20 MiB, so that free memory at its end serves
larger requests, and any rest of a block becomes a block [1]_.

References
----------
.. [1] PyTorch 2, ``c10/cuda/CUDACachingAllocator.cpp``: ``round_size``, ``get_allocation_size``, ``get_free_block``,
   ``should_split``, ``try_merge_blocks``, ``release_cached_blocks`` and ``try_allocate_expandable_block``.
"""

from typing import Any, NamedTuple

import numpy as np

from meshwise.simulator.engine.compiled import pays, run_loop
from meshwise.simulator.program import IntArray

MIB = 2**20
ROUNDING = 512
"""Bytes to whose multiples sizes are rounded (kMinBlockSize)."""
SMALL_SIZE = MIB
"""Bytes up to which a request is small (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
"""Bytes of a segment of small blocks (kSmallBuffer); large ones are rounded to its multiples (kRoundLarge)."""
MEDIUM_SIZE = 10 * MIB
"""Bytes from which a request gets a segment of its own size (kMinLargeAlloc)."""
MEDIUM_SEGMENT = 20 * MIB
"""Bytes of a segment of large blocks for smaller requests (kLargeBuffer)."""

COMPUTE, GATHER, REDUCE = range(3)
"""Streams that allocate: the compute stream, the one that gathers parameters and the one that reduces gradients."""
NUM_POOLS = 6
"""Pools of small and of large blocks for each stream."""
EVENT_TASKS = 5
"""Tasks of a step that Python walks in the time of one event (`meshwise.simulator.engine.compiled.pays`): 500,000
events took it 1.2 s."""
UNLIMITED = 2**60
"""More bytes than any device has."""


class Events(NamedTuple):
    """Allocations and releases in their order: each names a slot, and the bytes that it gets, 0 where it is released.

    ``streams`` are those that allocate; slots are numbered from 0 and used once.
    """

    slots: IntArray
    sizes: IntArray
    streams: IntArray


class Reservation(NamedTuple):
    """Bytes at their most: reserved by the allocator, and requested; ``fits`` says whether no request failed."""

    reserved: int
    requested: int
    fits: bool


def replay(
    events: Events, limit: int = UNLIMITED, *, is_expandable: bool = False, releases_first: bool = False
) -> Reservation:
    """Return what the allocator reserves for events.

    Parameters
    ----------
    limit
        Bytes that it can reserve. A request that fails is served nevertheless.
    is_expandable
        Whether segments are expandable.
    releases_first
        Whether free segments are given back before each new one, as if there were no room: the reserved bytes are then
        the least with which the events run.

    Examples
    --------
    A tensor of 30 MiB that follows one of 50 MiB takes its block, and leaves a block of 20 MiB:

    >>> events = Events(np.array([0, 0, 1]), np.array([50 * MIB, 0, 30 * MIB]), np.zeros(3, np.int64))
    >>> replay(events).reserved // MIB
    50
    """
    num_slots = int(events.slots.max(initial=-1)) + 1
    num_blocks = 2 * num_slots + 2
    settings = np.array([limit, is_expandable, releases_first, num_blocks], np.int64)
    counts = (3, num_slots, num_slots, *(num_blocks,) * 6, NUM_POOLS * num_blocks, NUM_POOLS, NUM_POOLS)
    columns = [np.zeros(count, np.int64) for count in counts]
    _, (result, *_) = run_loop(_run_events, (*events, settings), columns, pays(EVENT_TASKS * len(events.slots)))
    reserved, requested, num_failed = result.tolist()
    return Reservation(reserved, requested, not num_failed)


def _run_events(
    slots: Any,
    sizes: Any,
    streams: Any,
    settings: Any,
    result: Any,
    slot_blocks: Any,
    slot_sizes: Any,
    block_sizes: Any,
    previous: Any,
    following: Any,
    pools: Any,
    addresses: Any,
    is_free: Any,
    free_blocks: Any,
    free_counts: Any,
    tails: Any,
) -> None:
    """Replay events; blocks are numbered, -1 stands for none, and ``tails`` are the last blocks of ranges.

    ``free_blocks`` has the free blocks of one pool after another, by size and then by address.
    """
    limit, is_expandable, releases_first, stride = settings[0], settings[1], settings[2], settings[3]
    num_blocks, address, reserved, requested = 0, 0, 0, 0

    def find_place(pool: Any, size: Any, address: Any) -> Any:
        """Return the place of the first free block of a pool that is as large and as far."""
        low, high = pool * stride, pool * stride + free_counts[pool]
        while low < high:
            middle = (low + high) // 2
            block = free_blocks[middle]
            if block_sizes[block] < size or (block_sizes[block] == size and addresses[block] < address):
                low = middle + 1
            else:
                high = middle
        return low

    def take_block(pool: Any, place: Any) -> None:
        """Take the block at a place out of the free blocks of a pool."""
        is_free[free_blocks[place]] = 0
        end = pool * stride + free_counts[pool]
        for later in range(place + 1, end):  # an array's own copy of overlapping parts makes a third one first
            free_blocks[later - 1] = free_blocks[later]
        free_counts[pool] -= 1

    for pool in range(len(tails)):
        tails[pool] = -1
    for event in range(len(slots)):
        slot, size = slots[event], sizes[event]
        if size > 0:
            requested += size
            result[1] = max(result[1], requested)
            slot_sizes[slot] = size
            rounded = (size + ROUNDING - 1) // ROUNDING * ROUNDING
            is_small = rounded <= SMALL_SIZE
            pool = 2 * streams[event] + (0 if is_small else 1)
            place = find_place(pool, rounded, 0)
            if place < pool * stride + free_counts[pool]:
                best = free_blocks[place]
                take_block(pool, place)
            else:
                tail, grows = tails[pool], False
                if is_expandable:
                    grows = tail >= 0 and is_free[tail] > 0
                    page = SMALL_SEGMENT if is_small else MEDIUM_SEGMENT
                    missing = rounded - block_sizes[tail] if grows else rounded
                    segment = (missing + page - 1) // page * page
                elif is_small:
                    segment = SMALL_SEGMENT
                elif rounded < MEDIUM_SIZE:
                    segment = MEDIUM_SEGMENT
                else:
                    segment = (rounded + SMALL_SEGMENT - 1) // SMALL_SEGMENT * SMALL_SEGMENT
                if (releases_first or reserved + segment > limit) and not is_expandable:
                    for other in range(len(tails)):
                        start = kept = other * stride
                        for place in range(start, start + free_counts[other]):
                            block = free_blocks[place]
                            if previous[block] < 0 and following[block] < 0:
                                reserved -= block_sizes[block]
                                is_free[block] = 0
                            else:
                                free_blocks[kept] = block
                                kept += 1
                        free_counts[other] = kept - start
                if reserved + segment > limit:
                    result[2] += 1
                reserved += segment
                result[0] = max(result[0], reserved)
                if grows:
                    best = tail
                    place = find_place(pool, block_sizes[best], addresses[best])
                    take_block(pool, place)
                    block_sizes[best] += segment
                else:
                    best = num_blocks
                    num_blocks += 1
                    address += 1099511627776
                    block_sizes[best], pools[best], addresses[best] = segment, pool, address
                    previous[best], following[best] = -1, -1
                    if is_expandable:
                        if tail >= 0:
                            previous[best], following[tail] = tail, best
                            addresses[best] = addresses[tail] + block_sizes[tail]
                        tails[pool] = best
            rest = block_sizes[best] - rounded
            slot_blocks[slot] = best
            if rest < ROUNDING or (rest <= SMALL_SIZE and not is_small and not is_expandable):
                continue
            block = num_blocks
            num_blocks += 1
            block_sizes[best], block_sizes[block] = rounded, rest
            pools[block], addresses[block] = pool, addresses[best] + rounded
            previous[block], following[block] = best, following[best]
            if following[best] >= 0:
                previous[following[best]] = block
            following[best] = block
            if is_expandable and tails[pool] == best:
                tails[pool] = block
        else:
            requested -= slot_sizes[slot]
            block = slot_blocks[slot]
            pool = pools[block]
            for neighbour in (previous[block], following[block]):
                if neighbour >= 0 and is_free[neighbour] > 0:
                    place = find_place(pool, block_sizes[neighbour], addresses[neighbour])
                    take_block(pool, place)
                    first, second = (neighbour, block) if neighbour == previous[block] else (block, neighbour)
                    block_sizes[first] += block_sizes[second]
                    following[first] = following[second]
                    if following[second] >= 0:
                        previous[following[second]] = first
                    if is_expandable and tails[pool] == second:
                        tails[pool] = first
                    block = first
        place = find_place(pool, block_sizes[block], addresses[block])
        end = pool * stride + free_counts[pool]
        for later in range(end, place, -1):
            free_blocks[later] = free_blocks[later - 1]
        free_blocks[place] = block
        free_counts[pool] += 1
        is_free[block] = 1
