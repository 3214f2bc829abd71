"""Pipelines to test engines on: one-forward-one-backward and GPipe, as programs and as a recurrence."""

from collections.abc import Sequence

import numpy as np

from simulator.program import IntArray, Program, StreamKind, Task, TaskKind

from ..programs import STREAMS, program

SEND_FORWARD, SEND_BACKWARD = (STREAMS.index(kind) for kind in (StreamKind.SEND_FORWARD, StreamKind.SEND_BACKWARD))
Order = list[tuple[bool, int]]
"""(is it a forward, microbatch) in the order in which a stage runs them."""


def one_f_one_b(stages: int, stage: int, microbatches: int) -> Order:
    warm = min(stages - stage - 1, microbatches)
    order = [(True, index) for index in range(warm)]
    for index in range(microbatches - warm):
        order += [(True, warm + index), (False, index)]
    return order + [(False, index) for index in range(microbatches - warm, microbatches)]


def gpipe(stages: int, stage: int, microbatches: int) -> Order:
    return [(forward, index) for forward in (True, False) for index in range(microbatches)]


def pipeline(stages: int, microbatches: int, forward: Sequence[int], backward: Sequence[int], send: int) -> Program:
    """Return a 1F1B program: streams of compute, and transfers that hold one stream of each end."""
    number: dict[tuple[bool, int, int], int] = {}
    tasks: list[Task] = []
    left = [one_f_one_b(stages, stage, microbatches) for stage in range(stages)]
    while any(left):
        for stage in range(stages):
            while left[stage]:
                is_forward, index = left[stage][0]
                edge = stage == (0 if is_forward else stages - 1)
                before = (True, stage, index) if edge else (is_forward, stage + (-1 if is_forward else 1), index)
                if before not in number and not (edge and is_forward):
                    break
                needs = (number[before],) if before in number and before != (is_forward, stage, index) else ()
                if send and not edge:
                    sender = SEND_FORWARD if is_forward else SEND_BACKWARD
                    streams = tuple(sorted((7 * before[1] + sender, 7 * stage + sender + 1)))
                    tasks.append(Task(TaskKind.PIPELINE_COMMUNICATION, streams, send, needs))
                    needs = (len(tasks) - 1,)
                ticks = (forward if is_forward else backward)[stage]
                tasks.append(Task(TaskKind.FORWARD if is_forward else TaskKind.BACKWARD, (7 * stage,), ticks, needs))
                number[is_forward, stage, index] = len(tasks) - 1
                left[stage].pop(0)
    return program(tasks, stages, len(STREAMS))


class Recurrence:
    """Ends of a pipeline's passes by the recurrence itself, with a tail after the last of each stage."""

    def __init__(self, order: object, forward: Sequence[int], backward: Sequence[int], send: int, tail: Sequence[int]):
        self.order, self.forward, self.backward, self.send, self.tail = order, forward, backward, send, tail
        self.simulated = 0

    def rows(self, microbatches: int) -> tuple[IntArray, int]:
        """Return ends [microbatch, forward and backward of each stage], and the makespan."""
        self.simulated += microbatches
        stages = len(self.forward)
        ends = [[-1] * (2 * stages) for _ in range(microbatches)]
        orders = [self.order(stages, stage, microbatches) for stage in range(stages)]  # type: ignore[operator]
        free, place, moved = [0] * stages, [0] * stages, True
        while moved:
            moved = False
            for stage in range(stages):
                while place[stage] < len(orders[stage]):
                    is_forward, index = orders[stage][place[stage]]
                    ready = self._ready(ends[index], is_forward, stage, stages)
                    if ready < 0:
                        break
                    ticks = (self.forward if is_forward else self.backward)[stage]
                    free[stage] = max(free[stage], ready) + ticks
                    ends[index][stage if is_forward else stages + stage] = free[stage]
                    place[stage] += 1
                    moved = True
        return np.array(ends), max(end + tail for end, tail in zip(free, self.tail, strict=True))

    def _ready(self, row: list[int], is_forward: bool, stage: int, stages: int) -> int:
        if is_forward:
            end = row[stage - 1] if stage else -self.send
        else:
            end = row[stages + stage + 1] if stage < stages - 1 else row[stage] - self.send
        return end + self.send if end >= 0 or (is_forward and not stage) else -1
