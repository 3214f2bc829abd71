"""The table of all rules, by the name of the ATen operator."""

from typing import Any

import torch

from meshwise.executor.capture.rules import attention, elementwise, images, parts, products, reductions, views
from meshwise.executor.capture.rules.work import Rule

_FAMILIES = (views, parts, elementwise, reductions, products, attention, images)
RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}


def get_name(target: Any) -> str:
    """Return the name of an ATen operator without its overload, as ``linear``."""
    return str(target.overloadpacket.__name__)


def find_rule(target: Any) -> Rule | None:
    """Return the rule of an ATen operator, the pointwise rule where torch tags it as pointwise, else None."""
    return RULES.get(get_name(target), elementwise.pointwise if torch.Tag.pointwise in target.tags else None)
