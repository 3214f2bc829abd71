"""Write the completion times that SimGrid gives for random flows on a small leaf-spine network.

Run by hand, with the Python that SimGrid's bindings belong to; see ``fixtures/README.md``.
"""

import json
import multiprocessing
import random
import sys
from pathlib import Path
from typing import Any

HOSTS, LEAVES, FLOWS, SCENARIOS = 12, 3, 60, 20
OVERSUBSCRIPTION = 2
LATENCY = 0.001
"""Seconds; the same for every flow, because SimGrid weighs flows by the inverse of their latency."""
CONFIG = {
    "network/model": "CM02",
    "network/crosstraffic": "0",
    "network/TCP-gamma": "0",
    "network/bandwidth-factor": "1",
    "network/latency-factor": "1",
    "network/weight-S": "0",
    "surf/precision": "1e-15",
    "maxmin/precision": "1e-12",
}


def scenario(seed: int) -> dict[str, Any]:
    """Return random NICs (byte/s) and flows: start in ms, bytes, and the links of the route.

    Links are, in this order, out of each host, into it, up from each leaf, down to it.
    """
    draw = random.Random(seed)
    nics = [draw.randrange(500, 2000) * 10**6 for _ in range(HOSTS)]
    size = HOSTS // LEAVES
    uplinks = [sum(nics[leaf * size : (leaf + 1) * size]) // OVERSUBSCRIPTION for leaf in range(LEAVES)]
    flows = []
    for _ in range(FLOWS):
        source, target = draw.sample(range(HOSTS), 2)
        up, down = source // size, target // size
        spine = [2 * HOSTS + up, 2 * HOSTS + LEAVES + down] if up != down else []
        flows.append([draw.randrange(3000), draw.randrange(10**8, 2 * 10**9), [source, *spine, HOSTS + target]])
    return {"capacity": [*nics, *nics, *uplinks, *uplinks], "latency": LATENCY, "flows": flows}


def completion_times(case: dict[str, Any]) -> list[float]:
    """Return when each flow of a scenario ends in SimGrid, in s; works once in a process."""
    import simgrid  # type: ignore[import-not-found]

    engine = simgrid.Engine(["oracle", *(f"--cfg={key}:{value}" for key, value in CONFIG.items())])
    zone = simgrid.NetZone.create_full_zone("zone")
    links = [zone.create_link(f"link{n}", float(rate)) for n, rate in enumerate(case["capacity"])]
    for number, link in enumerate(links):
        link.set_latency(case["latency"] if number < HOSTS else 0.0)
        link.seal()
    hosts = [zone.create_host(f"host{n}", 1e9) for n in range(HOSTS)]
    routes = {(route[0], route[-1] - HOSTS): route for _, _, route in case["flows"]}
    for (source, target), route in routes.items():
        steps = [simgrid.LinkInRoute(links[n]) for n in route]
        zone.add_route(hosts[source].netpoint, hosts[target].netpoint, None, None, steps, False)
    zone.seal()
    ends = [0.0] * len(case["flows"])

    def send(number: int, start: int, size: int, source: int, target: int) -> None:
        simgrid.this_actor.sleep_until(start / 1000)
        simgrid.Comm.sendto(hosts[source], hosts[target], size)
        ends[number] = simgrid.Engine.clock

    for number, (start, size, route) in enumerate(case["flows"]):
        target = route[-1] - HOSTS
        simgrid.Actor.create(f"flow{number}", hosts[route[0]], send, number, start, size, route[0], target)
    engine.run()
    return ends


def main() -> None:
    """Write ``max_min_leaf_spine.json`` into the folder named on the command line."""
    cases = [scenario(seed) for seed in range(SCENARIOS)]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case, ends in zip(cases, pool.imap(completion_times, cases), strict=True):
            case["ends"] = ends
    text = json.dumps({"config": CONFIG, "scenarios": cases}, separators=(",", ":"))
    Path(sys.argv[1], "max_min_leaf_spine.json").write_text(text.replace('{"capacity"', '\n{"capacity"') + "\n")


if __name__ == "__main__":
    main()
