"""What `meshwise explain` is asked: why not another plan, what now when devices are lost, at what price."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scenarios.checking import check
from scenarios.errors import Fault, ScenarioError
from scenarios.reader import parse
from scenarios.schema import PlanTable
from strategies.parallelism import Attention
from strategies.recomputation import recomputation

MAX_QUESTION = 2000
"""Characters of what is asked for with ``--why-not``."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Parameters
    ----------
    asked
        What another plan is to have, by field: why not that one? Empty for no such question.
    lost
        Devices that are lost: what now? 0 for no such question.
    price
        Of a device for an hour.
    """

    asked: Mapping[str, Any]
    lost: int = 0
    price: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether everything is explained that there is."""
        return not self.asked and not self.lost


def plan_fields(text: str) -> dict[str, Any]:
    """Return what a text such as ``tensor=8,pipeline=2`` asks of a layout, by field.

    Raises
    ------
    ScenarioError
        Where a field or a value is none of a plan's.

    >>> plan_fields("tensor=8, recompute=full")
    {'tensor': 8, 'recompute': <Recompute.FULL: 'full'>}
    """
    if len(text) > MAX_QUESTION:
        message = f"a question has at most {MAX_QUESTION} characters, met {len(text)}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    parts = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text)]
    broken = next((part for part in parts if not re.fullmatch(r"\w+\s*=\s*.+", part)), None)
    if broken is not None:
        message = f"fields of a plan with values, as tensor=8,pipeline=2; met {broken!r}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    lines = (re.sub(r"\s*=\s*", ": ", part, count=1) for part in parts)
    document = parse("\n".join(lines).encode("utf-8", "surrogatepass"), "--why-not")
    table, faults = check(PlanTable, document)
    if faults or table is None:
        raise ScenarioError(tuple(faults))
    made = {"attention": Attention, "recompute": recomputation}
    given = [name for name in document.data if name in table.model_fields_set]
    return {name: made.get(name, lambda value: value)(getattr(table, name)) for name in given}
