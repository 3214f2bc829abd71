"""The scope of a proof, in words: the plans that a search covers, and the plans that it leaves out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwise.strategies.plan.layout import DECISIONS, DEGREES, Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.search.choices import Choices, list_offloadings
from meshwise.strategies.search.space import Space, find_choices

_LEFT_OUT = {name: item.left_out for name, item in DECISIONS.items() if item.left_out} | {"devices": "idle devices"}
"""By decision, what a space without a limit on it leaves out."""

_ALWAYS_LEFT_OUT = ("single operators sharded apart", "recompute that differs by stage but near the best plan")
"""What every space of layouts leaves out."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The plans that a proof about a space covers.

    Parameters
    ----------
    plans
        The number of legal plans, including those that do not fit.
    tried, left_out
        What the plans choose among, and what people may choose besides, in words.
    """

    plans: int
    tried: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.plans:,} plans: {'; '.join(self.tried)}; not tried: {', '.join(self.left_out)}"


def scope_of(problem: Problem, space: Space) -> Scope:
    """Return the scope of a proof about the plans of a space."""
    choices = find_choices(problem, space)
    families = tuple(choices.families())
    plans = sum(map(choices.count_layouts, families))
    return Scope(plans, tuple(_describe_tried(choices, families)), tuple(_describe_left_out(problem, space)))


def _describe_tried(choices: Choices, families: tuple[Layout, ...]) -> Iterator[str]:
    axes = [axis for axis in DEGREES if any(getattr(family, axis) > 1 for family in families)]
    yield " x ".join(axes) or "one device"
    sizes = sorted({family.microbatch for family in families if isinstance(family.microbatch, int)})
    if sizes:
        yield f"microbatches of {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
    names = {
        schedule_choice.name
        for family in families
        if family.pipeline > 1
        for schedule_choice in choices.list_schedules(family)
    }
    if names:
        yield ", ".join(name for name in SCHEDULES if name in names)
    groups = [group for family in _list_representatives(families) for group in choices.groups(family)]
    zeros = sorted({state.zero for group in groups for state in group.states})
    shards = any(family.zero_shards for family in families)
    if zeros != [0]:
        yield f"ZeRO {_format_numbers(zeros)}" + (" over all or a node" if shards else "")
    yield f"recompute {', '.join(_name_recomputes(choice.recompute for group in groups for choice in group.passes))}"
    if len({choice.overlap_tensor for group in groups for choice in group.passes}) > 1:
        yield "tensor communication beside products or not"
    if any(state.offload for group in groups for state in group.states):
        yield "offload of optimizer states"


def _list_representatives(families: tuple[Layout, ...]) -> Iterator[Layout]:
    """Yield the first and the last family of every kind; families of a kind differ in the layers of their stages.

    Listing the groups of all families would take as long as a search.
    """
    kinds: dict[tuple[bool, ...], list[Layout]] = {}
    for family in families:
        kind = family.pipeline > 1, family.tensor > 1, family.data > 1, family.zero_shards > 0
        kinds.setdefault(kind, []).append(family)
    for members in kinds.values():
        yield from dict.fromkeys((members[0], members[-1]))


def _name_recomputes(values: Iterable[Recomputation]) -> dict[str, None]:
    return dict.fromkeys("some layers" if isinstance(value, FirstLayers) else str(value) for value in values)


def _format_numbers(numbers: list[int]) -> str:
    """Return rising numbers in words.

    >>> _format_numbers([0, 1, 2, 3]), _format_numbers([1, 3])
    ('0 to 3', '1 and 3')
    """
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return " and ".join(map(str, numbers))


def _describe_left_out(problem: Problem, space: Space) -> Iterator[str]:
    # a search adds this limit by itself where nothing fits: the user has not stated it
    stated_space = space.with_limits(offload=None) if space.offload == list_offloadings() else space
    limits = [name for name in stated_space.limits if name != "tensor_depth"]
    if space.accepts is not None:
        yield "what the target cannot say"
    elif limits:
        yield f"what the limits of {', '.join(limits)} forbid"
    for name, words in _LEFT_OUT.items():
        if getattr(space, name) is None and (not space.wide or (name in DECISIONS and DECISIONS[name].never_tried)):
            yield words
    if space.core:
        yield "more than 3-D parallelism with ZeRO 0 and 1"
    yield from _ALWAYS_LEFT_OUT
