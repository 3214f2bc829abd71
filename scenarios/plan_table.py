"""What the table of a plan means: its layout, and the rules of a problem that it breaks."""

from scenarios.schema import MAX_ACTIONS, MAX_MICROBATCHES, STEPS_IN_A_ROW, PlanTable
from strategies.layout import Layout
from strategies.layout_rules import violations
from strategies.parallelism import Attention
from strategies.problem import Problem
from strategies.recomputation import recomputation
from strategies.schedule import SCHEDULES
from strategies.violation import Violation


def layout_in(table: PlanTable) -> Layout:
    """Return the layout that a plan table states."""
    choices = {"recompute": recomputation(table.recompute), "offload": table.offload}
    return Layout(**table.model_dump() | choices | {"attention": Attention(table.attention)})


def rule_violations(problem: Problem, layout: Layout) -> list[Violation]:
    """Return every rule that a layout breaks, and whether its schedule is too long to be listed."""
    training = problem.training
    microbatches = training.global_batch // layout.sequences
    actions = layout.pipeline * layout.chunks * microbatches
    rule = SCHEDULES.get(layout.schedule)
    most = MAX_ACTIONS // (STEPS_IN_A_ROW if rule is not None and rule.asynchronous else 1)
    if microbatches > MAX_MICROBATCHES:
        met = f"global_batch / (data * microbatch) = {microbatches}"
        return [Violation("microbatch", f"a step has at most {MAX_MICROBATCHES} microbatches, met {met}")]
    if actions > most:
        met = f"pipeline * chunks * microbatches = {actions}"
        return [Violation("pipeline", f"a schedule has at most {most} stages times microbatches, met {met}")]
    return list(violations(problem, layout))
