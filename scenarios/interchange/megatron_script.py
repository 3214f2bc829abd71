"""The bash script that hands arguments to Megatron-LM's ``pretrain_gpt.py``: written, and read line by line."""

import re
from collections.abc import Iterator
from typing import Any

from scenarios.interchange.entry import Values
from scenarios.interchange.facts import Request
from scenarios.interchange.lines import Pair, argument, document
from scenarios.interchange.megatron_layers import RECOMPUTED, parse_literal, strip_layers, write_layers
from scenarios.reader import Document
from simulator.models.transformer import Transformer

NODES, EACH = "NNODES", "NPROC_PER_NODE"
"""Variables of the script: hosts, and ranks on each."""

_ORDERED = ("tensor-model", "context")
"""Axes whose collectives have to be launched in order, before Blackwell (``CUDA_DEVICE_MAX_CONNECTIONS=1``)."""

_SHARD_PARAMETERS = {"--use-megatron-fsdp", "--use-torch-fsdp2"}
"""Arguments that shard parameters: their gathers run beside products, on a queue of their own."""

_HEAD = """#!/bin/bash
# {title}
# For Megatron-LM ({called}; `meshwise export --to megatron`). On each host, in its folder:
#   NODE_RANK=0 MASTER_ADDR=host0 bash FILE --data-path ...
{remarks}{nodes}={hosts}
{each}={ranks}
{environment}{layers}ARGUMENTS=(
"""
_FOOT = """)
torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --node-rank "${NODE_RANK:-0}" \\
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \\
    pretrain_gpt.py "${ARGUMENTS[@]}" "$@"
"""
_UNCLIPPED = """# --clip-grad 0.0 clips nothing: the scenario has gradient_clipping false, or says nothing of it.
#   Megatron-LM's own default is 1.0.
"""
_ROUTING = """# Routing is priced with {load}. What balances it is yours to state:
#   --moe-aux-loss-coeff, 0.0 where nothing is stated.
"""
_ONE_CONNECTION = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"


def write(values: Values, request: Request, called: str) -> str:
    """Return the script of arguments; one queue of kernels a device where `validate_args` asks for it.

    A module of layers, where they compute something again that no argument says, stands before the arguments.
    """
    hosts, ranks = request.hosts
    ordered = any(f"--{axis}-parallel-size" in values for axis in _ORDERED)
    one = ordered and not values.keys() & _SHARD_PARAMETERS
    environment = _ONE_CONNECTION if one else ""
    head = _HEAD.format(
        title=request.title,
        called=called,
        remarks="".join(_remarks(values, request)),
        nodes=NODES,
        each=EACH,
        hosts=hosts,
        ranks=ranks,
        environment=environment,
        layers=write_layers(values[RECOMPUTED]) if RECOMPUTED in values else "",
    )
    arguments = (_argument(key, value) for key, value in values.items() if key != RECOMPUTED)
    return head + "".join(f"    {argument}\n" for argument in arguments) + _FOOT


def _remarks(values: Values, request: Request) -> Iterator[str]:
    """Yield comments on what a reader may take for granted: the norm of gradients, and the load of experts."""
    if values.get("--clip-grad") == 0:
        yield _UNCLIPPED
    if isinstance(request.spec, Transformer) and (experts := request.spec.experts):
        balanced = experts.imbalance == 1
        load = "balanced experts" if balanced else f"an expert of {experts.imbalance:g} times the mean load"
        yield _ROUTING.format(load=load)


def _argument(key: str, value: Any) -> str:
    if isinstance(value, list):
        return " ".join((key, *value))
    return key if value is True else f"{key} '{value}'" if re.search(r"[|()*\[]", str(value)) else f"{key} {value}"


_IGNORED = re.compile(r"#.*|ARGUMENTS=\(|\)||export CUDA_DEVICE_MAX_CONNECTIONS=1")


def parse(content: bytes, file: str) -> Document:
    """Return the document of a script, argument by argument; ``ScenarioError`` where a line is something else."""
    foot = _FOOT.removeprefix(")\n").encode()
    stripped = strip_layers(content, file)
    return document(stripped.removesuffix(foot), file, _pair if stripped == content else _parse_line_beside_layers)


def _parse_line_beside_layers(line: str) -> Pair | None:
    return parse_literal(line) or _pair(line)


def _pair(line: str) -> Pair | None:
    if _IGNORED.fullmatch(line):
        return None
    if found := re.fullmatch(rf"({NODES}|{EACH})=([0-9]{{1,9}})", line):
        return found[1], int(found[2])
    return argument(line)
