"""One rank that runs many plans of captured modules in one process group: ``python -m ranks FOLDER``.

``FOLDER/cases.json`` has them; what each rank found goes to ``FOLDER/found-RANK.json``.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from modules import make
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from meshwise.executor.capture.capture import capture
from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.launch.process_group import join_process_group
from meshwise.executor.launch.worker import run_rank
from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.network import OperatorNetwork
from meshwise.executor.operators.trainer import Pipeline, build_device_mesh
from meshwise.executor.recording.rank_files import Heartbeat
from meshwise.executor.recording.recorder import Recorder
from meshwise.strategies.plan.mesh import PIPELINE
from meshwise.strategies.plan.plan import Plan

Sent = Counter[tuple[int, int]]
"""Bytes that a rank sends in a step, by the pipeline position of both ends."""


@contextmanager
def watched(position: int, ranks: RankMesh) -> Iterator[Sent]:
    """Count what is sent inside the body."""
    sent, send = Sent(), dist.isend
    lines = dist.get_process_group_ranks(ranks.mesh.get_group(PIPELINE)) if PIPELINE in ranks.size else [0]

    def counting(tensor: Tensor, to: int, **options: Any) -> Any:
        sent[position, lines.index(to)] += tensor.numel() * tensor.element_size()
        return send(tensor, to, **options)

    dist.isend = counting
    try:
        yield sent
    finally:
        dist.isend = send


def renewed(module: Any) -> dict[str, Tensor]:
    """Return what a step leaves in a module besides its parameters: its gradients, and its buffers."""
    gradients = {name: each.grad.clone() for name, each in module.named_parameters()}
    return gradients | {name: each.clone() for name, each in module.named_buffers()}


def one_process(module: Any, microbatches: list[Any]) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of one step of one process, and its gradients and buffers; the module is left as it was."""
    before = {name: each.clone() for name, each in module.named_buffers()}
    module.zero_grad()
    total = 0.0
    for inputs in microbatches:
        loss = module(*inputs) / len(microbatches)
        loss.backward()
        total += float(loss.detach())
    found = renewed(module)
    for name, each in module.named_buffers():
        each.copy_(before[name])
    return total, found


def run(
    plan: Plan, captured: CapturedModule, module: Any, microbatches: list[Any], recorder: Recorder
) -> dict[str, Any]:
    """Return how far one step of a plan is from one process, what ran, and what torch counted of it."""
    expected_loss, expected = one_process(module, microbatches)
    ranks = RankMesh(build_device_mesh(plan, "cpu"))
    network = OperatorNetwork(captured, module, plan, ranks, torch.device("cpu"))
    pipeline = Pipeline(network, plan, recorder)
    position = ranks.coordinate.get(PIPELINE, 0)
    ranks.records.clear()
    with CommDebugMode() as counted, watched(position, ranks) as sent:
        loss = pipeline.step(microbatches)
        network.sum_gradients()
    ran = Counter((str(each.collective), each.axis, each.size) for each in ranks.records)
    passing = sum(count for kind, count in counted.get_comm_counts().items() if str(kind).endswith(("send", "recv_")))
    error = 0.0 if loss is None else abs(loss - expected_loss)
    for name, part in network.parts.items():
        assert part.grad is not None
        difference = network.gather_parameter(name, part.grad) - expected[name]
        error = max(error, float(difference.abs().max()))
    for name, stage in network.buffers_of.items():
        error = max(error, float((stage.gather_buffer(name) - expected[name]).abs().max()))
    return {
        "position": position,
        "error": error,
        "parameters": list(network.parts),
        "renewed": list(network.buffers_of),
        "ran": [[*key, count] for key, count in ran.items()],
        "sent": [[*key, size] for key, size in sent.items()],
        "counted": counted.get_total_counts() - passing,
    }


def main(folder: Path, rank: int) -> None:
    """Run every case."""
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    known: dict[str, tuple[CapturedModule, Any]] = {}
    recorder = Recorder(Heartbeat(folder, rank))
    found = []
    with join_process_group(folder, 60.0):
        for case in cases:
            name, plan = case["module"], Plan.from_json(case["plan"])
            if name not in known:
                module, inputs = make(name, dtype=torch.float64)
                known[name] = capture(module, inputs), module
            microbatches = [make(name, seed, torch.float64)[1] for seed in range(plan.num_microbatches)]
            found.append(run(plan, *known[name], microbatches, recorder))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, rank)))
