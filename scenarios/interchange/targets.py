"""Every trainer in whose words a plan can be said, by name."""

from scenarios.interchange.accelerate import ACCELERATE
from scenarios.interchange.deepspeed import DEEPSPEED
from scenarios.interchange.megatron import MEGATRON
from scenarios.interchange.nanotron import NANOTRON
from scenarios.interchange.target import Target
from scenarios.interchange.torchtitan import TORCHTITAN

TARGETS: dict[str, Target] = {target.name: target for target in (TORCHTITAN, MEGATRON, DEEPSPEED, ACCELERATE, NANOTRON)}
"""Targets by the name that ``meshwise export --to`` takes."""
