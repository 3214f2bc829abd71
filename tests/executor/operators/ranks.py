"""One rank that runs many plans of captured modules in one process group: ``python -m ranks FOLDER``.

``FOLDER/cases.json`` has them; what rank 0 found goes to ``FOLDER/found.json``.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from modules import make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from executor.capture.capture import capture
from executor.capture.captured import Captured
from executor.operators.collectives import Ranks
from executor.operators.network import OperatorNetwork, Pass
from executor.process_group import joined
from executor.worker import run_rank
from strategies.plan import Stage
from strategies.sharding import OperatorSharding


def sharding(document: dict[str, Any]) -> OperatorSharding:
    """Return a sharding from JSON."""
    cuts = tuple((dim, tuple(axes)) for dim, axes in document["cuts"])
    kept = tuple((name, tuple((dim, tuple(axes)) for dim, axes in each)) for name, each in document["kept"])
    return OperatorSharding(document["operator"], cuts, kept)


def run(case: dict[str, Any], captured: Captured, module: Any, inputs: Any) -> dict[str, Any]:
    """Return how far one step of a case is from one process, and the collectives that ran, noted and counted."""
    loss = module(*inputs)
    module.zero_grad()
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    axes = dict(case["axes"])
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    ranks = Ranks(mesh)
    shardings = {each["operator"]: sharding(each) for each in case["shardings"]}
    stages = (Stage(tuple(name for block in captured.graph.blocks for name in block.names())),)
    network = OperatorNetwork(captured, module, shardings, ranks, stages, (0,))
    ranks.ran.clear()
    with CommDebugMode() as counted:
        step = Pass(network, network.programs[0], inputs)
        step.forward(())
        found = step.loss()
        step.backward((), found)
        network.sum_gradients()
    ran = Counter((str(each.collective), each.axis, each.size) for each in ranks.ran)
    error = abs(float(found.detach()) - float(loss.detach()))
    for root, part in network.parts.items():
        assert part.grad is not None
        difference = network.whole(root, part.grad) - expected[network.names[root]]
        error = max(error, float(difference.abs().max()))
    return {"error": error, "ran": [[*key, count] for key, count in ran.items()], "counted": counted.get_total_counts()}


def main(folder: Path, rank: int) -> None:
    """Run every case."""
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    known: dict[str, tuple[Captured, Any, Any]] = {}
    found = []
    with joined(folder, 60.0):
        for case in cases:
            if case["module"] not in known:
                module, inputs = make(case["module"], dtype=torch.float64)
                known[case["module"]] = capture(module, inputs), module, inputs
            found.append(run(case, *known[case["module"]]))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    here = Path(sys.argv[1])
    sys.exit(run_rank(here, lambda rank: main(here, rank)))
