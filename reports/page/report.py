"""The content of a page: one step of a plan, with its search, explanation and run where they are known."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.explanation.critical_path import CriticalPath
from meshwise.strategies.plan.plan import Plan

Data = Mapping[str, Any]
"""What a command prints with ``--json``."""


@dataclass(frozen=True, slots=True)
class Report:
    """A simulated step of a plan; optionally the search that found it, its explanation, and its measured run.

    Parameters
    ----------
    result
        What ``simulate --json`` prints of the plan.
    timeline
        The simulated step.
    searches
        What ``search --json`` prints, one for each algorithm.
    explanation
        What ``explain --json`` prints.
    run
        What ``execute --json`` prints.
    measured
        The measured step.
    path
        The critical path of the simulated step.

    Raises
    ------
    ValueError
        Where a timeline has no spans.
    """

    title: str
    result: Data
    timeline: Timeline
    plan: Plan
    cluster: Cluster
    searches: tuple[Data, ...] = ()
    explanation: Data = field(default_factory=dict)
    run: Data = field(default_factory=dict)
    measured: Timeline | None = None
    path: CriticalPath | None = None

    __repr__ = brief_repr("title")

    def __post_init__(self) -> None:
        for timeline in self.timelines:
            if not len(timeline.spans) or timeline.step_time <= 0:
                raise ValueError(
                    f"a page needs spans and a step time above 0, met {len(timeline.spans)} spans "
                    f"and {timeline.step_time} s"
                )

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The predicted step, and the measured one where there is one."""
        return (self.timeline,) if self.measured is None else (self.timeline, self.measured)
