"""The order in which an expert would try layouts."""

from strategies.layout import Layout
from strategies.problem import Problem
from strategies.search.space import Space, listed


def by_habit(problem: Problem, space: Space) -> list[Layout]:
    """Return the layouts of ``space``: data parallelism first, then ever more model parallelism.

    Before all others those with microbatches of one sequence and 1f1b; tensor parallelism inside a node before
    pipeline parallelism, and that before tensor parallelism across nodes (Narayanan et al., "Efficient large-scale
    language model training on GPU clusters using Megatron-LM", SC 2021, section 3, takeaways 1 and 2).
    """
    node = problem.cluster.first.devices

    def key(layout: Layout) -> tuple[bool, bool, int, int]:
        unusual = layout.microbatch != 1 or layout.schedule != "1f1b"
        return unusual, layout.tensor > node, layout.tensor * layout.pipeline, layout.pipeline

    return sorted(listed(problem, space), key=key)
