"""Pipelines to test engines on: one-forward-one-backward, as programs."""

from collections.abc import Sequence

from meshwise.simulator.program import Program, StreamKind, Task, TaskKind

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
