"""The step of training in a loop of the user's own, whole on every rank, in stages, or with cut operators."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.strategies.plan.plan import Plan

if TYPE_CHECKING:
    from meshwise.executor.capture.captured import CapturedModule
    from meshwise.executor.cut_modules.step import CutStep
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.modules.step import TrainingStep


def parallelize(
    module: Any, plan: "Plan | ModuleLayout | str | Path | None" = None, **options: Any
) -> "TrainingStep | CutStep":
    """Return the step of training of a module under a plan, in a loop of the user's own.

    It is called on every rank that a launcher such as torchrun has started. What it returns is called with the samples
    of the rank, and returns the loss of the global batch.

    Parameters
    ----------
    module
        A ``torch.nn.Module``, whole and with equal parameters on every rank; its forward takes a batch. Or a function
        that returns it, of which a rank makes only the parameters that it keeps where ranks share them.
    plan
        A plan or the file of one, words such as ``data=2,zero=3`` or ``data=2,tensor=2``, or a `ModuleLayout`; by
        default data parallelism over all ranks. Words with ``tensor`` have the shardings of operators searched for.
    options
        Those of `meshwise.executor.stages.parallelize.parallelize`: ``optimizer``, ``scheduler``, ``loss``,
        ``precision``, ``max_norm``, ``learning_rate`` and ``seed``.

    Raises
    ------
    ValueError
        Where the plan says what a step does not do, or has another number of ranks.
    """
    from torch import nn

    from meshwise.executor.cut_modules.cut_stages import make_cut_step
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.modules.optimizers import make_adamw
    from meshwise.executor.modules.step import find_device
    from meshwise.executor.stages.parallelize import join_ranks, read_layout
    from meshwise.executor.stages.parallelize import parallelize as parallelize_whole
    from meshwise.executor.starting.construction import start_module
    from meshwise.scenarios.inputs.operator_cuts import choose_cuts

    join_ranks()
    layout = plan if isinstance(plan, ModuleLayout) else read_layout(plan)
    if layout.tensor == 1:
        return parallelize_whole(module, layout, **options)

    def choose_plan(captured: "CapturedModule") -> Plan:
        samples = captured.batch // layout.data
        degrees = {"data": layout.data, "tensor": layout.tensor, "num_microbatches": layout.num_microbatches}
        return choose_cuts(captured.graph, samples=samples, **degrees)

    if not isinstance(module, nn.Module):
        module = start_module(module, options.get("seed", 0)).build()
    learning_rate = options.pop("learning_rate", 1e-3)
    options["optimizer"] = options.get("optimizer") or make_adamw(learning_rate)
    return make_cut_step(module, layout, device=find_device(), choose_plan=choose_plan, **options)
