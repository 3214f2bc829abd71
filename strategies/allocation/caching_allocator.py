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
"""Bytes of a segment of small blocks (kSmallBuffer), and to whose multiples large segments are rounded (kRoundLarge)."""
MEDIUM_SIZE = 10 * MIB
"""Bytes from which a request gets a segment of its own size (kMinLargeAlloc)."""
MEDIUM_SEGMENT = 20 * MIB
"""Bytes of a segment of large blocks for smaller requests (kLargeBuffer)."""

COMPUTE, GATHER, REDUCE = range(3)
"""Streams that allocate: the compute stream, the one that gathers parameters and the one that reduces gradients."""
NUM_POOLS = 6
"""Pools of small and of large blocks for each stream."""
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
    settings = np.array([limit, is_expandable, releases_first], np.int64)
    counts = (4, num_slots, num_slots, num_blocks, num_blocks, num_blocks, num_blocks, num_blocks, num_blocks)
    columns = [np.zeros(count, np.int64) for count in (*counts, num_blocks, NUM_POOLS)]
    _, (result, *_) = run_loop(_run_events, (*events, settings), columns, pays(len(events.slots)))
    reserved, requested, num_failed, _ = result.tolist()
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
    free_blocks: Any,
    free_places: Any,
    tails: Any,
) -> None:
    """Replay events; blocks are numbered, -1 stands for none, and ``tails`` are the last blocks of ranges."""
    limit, is_expandable, releases_first = settings[0], settings[1], settings[2]
    num_blocks, num_free, address = 0, 0, 0
    reserved, requested = 0, 0
    for pool in range(len(tails)):
        tails[pool] = -1
    for event in range(len(slots)):
        slot, size = slots[event], sizes[event]
        if size > 0:
            requested += size
            result[1] = max(result[1], requested)
            slot_sizes[slot] = size
            rounded = (size + 511) // 512 * 512
            is_small = rounded <= 1048576
            pool = 2 * streams[event] + (0 if is_small else 1)
            best = -1
            for place in range(num_free):
                block = free_blocks[place]
                if pools[block] == pool and block_sizes[block] >= rounded:
                    if (
                        best < 0
                        or block_sizes[block] < block_sizes[best]
                        or (block_sizes[block] == block_sizes[best] and addresses[block] < addresses[best])
                    ):
                        best = block
            if best < 0:
                if is_expandable:
                    page = 2097152 if is_small else 20971520
                    tail = tails[pool]
                    has_room = tail >= 0 and free_places[tail] >= 0
                    missing = rounded - block_sizes[tail] if has_room else rounded
                    segment = (missing + page - 1) // page * page
                elif is_small:
                    segment = 2097152
                elif rounded < 10485760:
                    segment = 20971520
                else:
                    segment = (rounded + 2097151) // 2097152 * 2097152
                if (releases_first or reserved + segment > limit) and not is_expandable:
                    place = 0
                    while place < num_free:
                        block = free_blocks[place]
                        if previous[block] < 0 and following[block] < 0:
                            reserved -= block_sizes[block]
                            num_free -= 1
                            free_blocks[place] = free_blocks[num_free]
                            free_places[free_blocks[place]] = place
                            free_places[block] = -1
                        else:
                            place += 1
                if reserved + segment > limit:
                    result[2] += 1
                reserved += segment
                result[0] = max(result[0], reserved)
                if is_expandable and has_room:
                    best = tail
                    block_sizes[best] += segment
                else:
                    best = num_blocks
                    num_blocks += 1
                    block_sizes[best], previous[best], following[best], pools[best] = segment, -1, -1, pool
                    address += 1099511627776
                    addresses[best], free_places[best] = address, -1
                    if is_expandable:
                        if tails[pool] >= 0:
                            previous[best] = tails[pool]
                            following[tails[pool]] = best
                            addresses[best] = addresses[tails[pool]] + block_sizes[tails[pool]]
                        tails[pool] = best
            if free_places[best] >= 0:
                place = free_places[best]
                num_free -= 1
                free_blocks[place] = free_blocks[num_free]
                free_places[free_blocks[place]] = place
                free_places[best] = -1
            rest = block_sizes[best] - rounded
            if (rest >= 512) if (is_small or is_expandable) else (rest > 1048576):
                block = num_blocks
                num_blocks += 1
                block_sizes[best] = rounded
                block_sizes[block], pools[block], previous[block] = rest, pool, best
                addresses[block], following[block] = addresses[best] + rounded, following[best]
                if following[best] >= 0:
                    previous[following[best]] = block
                following[best] = block
                if is_expandable and tails[pool] == best:
                    tails[pool] = block
                free_blocks[num_free], free_places[block] = block, num_free
                num_free += 1
            slot_blocks[slot] = best
        else:
            requested -= slot_sizes[slot]
            block = slot_blocks[slot]
            for neighbour in (previous[block], following[block]):
                if neighbour >= 0 and free_places[neighbour] >= 0:
                    place = free_places[neighbour]
                    num_free -= 1
                    free_blocks[place] = free_blocks[num_free]
                    free_places[free_blocks[place]] = place
                    free_places[neighbour] = -1
                    first, second = (neighbour, block) if neighbour == previous[block] else (block, neighbour)
                    block_sizes[first] += block_sizes[second]
                    following[first] = following[second]
                    if following[second] >= 0:
                        previous[following[second]] = first
                    if is_expandable and tails[pools[second]] == second:
                        tails[pools[second]] = first
                    block = first
            free_blocks[num_free], free_places[block] = block, num_free
            num_free += 1
    result[3] = num_blocks
