# ruff: noqa: RUF009  (a decision is the declaration of a field)
"""The decisions of a plan, each declared once, and the layout that a user writes.

A declaration has the default of a decision, its values, its text and what a search tries. The schema of scenario
files, the space of a search, the document of a plan, its description, the neighbours of a layout and the check of
other trainers' field maps are derived from it. Which combinations of decisions are legal is in
`meshwise.strategies.plan.rules`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from math import prod
from typing import Any, NamedTuple

from meshwise.simulator.brief import brief_repr
from meshwise.strategies.plan.mesh import AXES, REPLICA, SEQUENCE_AXES, Microbatch, normalise_microbatch
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading, offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recomputation, Recompute, recomputation
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.tables.embeddings import NO_EMBEDDINGS, Embeddings, parse_embeddings

ZERO_STAGES = (0, 1, 2, 3)
"""Stages of ZeRO: data ranks share nothing, the optimizer's states, gradients too, parameters too."""

GRADIENT_REDUCTIONS = ("all_reduce", "parameter_server")
"""Who sums gradients over the data axis: all its ranks together, or a central server."""

SYNCHRONOUS = tuple(name for name, rule in SCHEDULES.items() if not rule.is_asynchronous)
"""Schedules that end a step on all ranks before the next one begins; all others train on older weights."""

CORE_SCHEDULES = ("1f1b", "gpipe", "interleaved")
"""The schedules of a core space."""

USUAL_SCHEDULES = (*CORE_SCHEDULES, "zb1p", "interleaved_zero_bubble", "zbv")
"""Schedules in use today: torchtitan, torch.distributed.pipelining and zero-bubble forks of Megatron-LM run them."""


class Level(Enum):
    """Where in a search a decision is taken: the first four one within the other, then rows and columns of a group."""

    DEGREE = auto()
    """The number of ranks along an axis of the mesh."""
    FAMILY = auto()
    """With the degrees, the mesh, the cuts of operators and the microbatch; shared by the layouts of a family."""
    SCHEDULE = auto()
    """The schedule, its chunks and its stages."""
    GROUP = auto()
    """With the schedule, all that the layouts of a group share, whose bounds are computed together."""
    PASS = auto()
    """How passes run: a row of a group."""
    STATE = auto()
    """Where states are and how gradients are summed: a column of a group."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The declaration of one decision of a plan.

    Parameters
    ----------
    name
        The field of a `Layout`, and the key in a scenario's ``plan`` and ``search.space``.
    default
        The value where a layout states none.
    text
        One sentence for the schema and the reference.
    level
        Where in a search it is decided.
    values
        All values, the usual one first; empty where they are too many to list.
    core, usual, wide
        The values that the three extents of a space try without a limit; ``usual`` is the default value alone unless
        stated, and ``core`` and ``wide`` are the usual values unless stated.
    extent
        The values that the three extents try, in words.
    least, most
        Bounds of a whole number; ``most`` is ``None`` where only the number of ranks bounds it.
    words
        A function from a value to words for the plan's description, which has no words for the default.
    needs
        Another decision and its values, without one of which only the default is legal.
    because
        Why it needs them, in words that follow ``needs NAME VALUE`` in a message.
    matters
        A function from a layout or plan to whether the decision changes anything there; ``None`` for wherever it is
        free.
    parse
        A function from what a plan document states to the value.
    required
        Whether every plan document states it.
    absent
        The value where a plan document leaves it out; the default unless stated.
    document
        The key of a plan document where it differs from the name.
    left_out
        What a space without a limit leaves out, in words; empty where it leaves nothing out.
    never_tried
        Whether a wide space leaves that out too.
    """

    name: str
    default: Any
    text: str = ""
    level: Level = Level.GROUP
    values: tuple[Any, ...] = ()
    core: tuple[Any, ...] = ()
    usual: tuple[Any, ...] = ()
    wide: tuple[Any, ...] = ()
    extent: str = ""
    least: int = 1
    most: int | None = None
    words: Callable[[Any], str] | None = None
    needs: tuple[str, tuple[Any, ...]] | None = None
    because: str = ""
    matters: Callable[[Any], bool] | None = None
    parse: Callable[[Any], Any] | None = None
    required: bool = False
    absent: Any = None
    document: str = ""
    left_out: str = ""
    never_tried: bool = False

    __repr__ = brief_repr("name", "default", "values")

    @property
    def key(self) -> str:
        """The key in a plan document."""
        return self.document or self.name

    def changes(self, plan: "StepDecisions") -> bool:
        """Return whether the decision changes anything, given the other decisions of a layout or a complete plan."""
        return self.is_free(plan) if self.matters is None else self.matters(plan)

    def is_free(self, plan: "StepDecisions") -> bool:
        """Return whether a layout or plan has what a value other than the default needs."""
        return self.needs is None or getattr(plan, self.needs[0]) in self.needs[1]

    def read(self, document: Mapping[str, Any]) -> Any:
        """Return the value that a plan document states; ``KeyError`` where a required one is missing."""
        if self.key not in document and not self.required:
            return self.absent
        value = document[self.key]
        return value if self.parse is None else self.parse(value)


def decision(default: Any, text: str = "", level: Level = Level.GROUP, **properties: Any) -> Any:
    """Return a dataclass field whose metadata declares a `Decision`.

    ``properties`` are the other fields of `Decision`; ``words`` may also be one phrase for all values. A flag has both
    values.
    """
    if isinstance(default, bool):
        properties.setdefault("values", (default, not default))
    if isinstance(phrase := properties.get("words"), str):
        properties["words"] = lambda value: phrase
    properties.setdefault("absent", default)
    properties.setdefault("usual", (default,))
    properties.setdefault("core", properties["usual"])
    properties.setdefault("wide", properties["usual"])
    return field(default=default, metadata={"text": text, "level": level} | properties)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecisions:
    """How a step runs on a mesh: the decisions that a `Layout` and its complete plan have in common.

    Parameters
    ----------
    microbatch
        Sequences of a microbatch: one number for all data ranks, or one number per data rank. All data ranks run the
        same number of microbatches.
    schedule
        The name of a schedule, or its order in text form; ``chunks`` 1 then means what the text says.
    chunks
        Stages per pipeline rank; of a written order the largest number of any rank.
    attention
        How context ranks compute attention; ``None`` in a complete plan where a sequence is on one rank.
    zero
        What the ranks that share states keep as shards: 1 the optimizer's states, 2 gradients too,
        3 parameters too; 0 for nothing.
    reshard_after_forward
        Whether ZeRO 3 frees gathered parameters after forward and gathers them again for backward.
    offload
        What is kept in host memory.
    gradient_reduction
        Who sums gradients over the data axis: all its ranks (``all_reduce``), or the first rank as a central
        ``parameter_server``.
    overlap_gradients
        Whether gradients are reduced while backward makes others; with ZeRO 3 also whether parameters are gathered
        while others are used.
    sequence_parallel
        Whether tensor ranks divide the tokens of operators that they do not cut otherwise.
    overlap_tensor
        Whether the gathers and scatters of sequence parallelism run beside the products that read or make their
        tensors, chunk by chunk (`meshwise.strategies.lowering.costs.rewrites`).
    scatter_gather
        Whether each tensor rank sends one slice of a stage boundary, and the receivers gather the slices.
    recompute
        What backward computes again instead of keeping it.
    placement
        The device of every rank, in order of rank; empty for rank ``i`` on the ``i``-th free device. Other devices
        stay idle.
    embeddings
        Where embedding tables are (`meshwise.strategies.tables.embeddings`).
    """

    microbatch: Microbatch = decision(
        1,
        "Sequences per microbatch and data-parallel rank, or a list of one size a data rank.",
        Level.FAMILY,
        parse=normalise_microbatch,
        required=True,
        extent="usually the powers of two that divide the batch of a data rank, and that batch itself (no gradient "
        "accumulation), of 131,072 tokens at most where they are several. Core: of any number of tokens. Wide, or by "
        "a limit: any divisor",
        left_out="microbatches that are no power of two, or of more than 131,072 tokens",
    )
    schedule: str = decision(
        "1f1b",
        "A schedule by name, or its order: one line a pipeline rank, as in 0F0 0F1 0B0 0B1.",
        Level.SCHEDULE,
        values=SYNCHRONOUS,
        core=CORE_SCHEDULES,
        usual=USUAL_SCHEDULES,
        wide=SYNCHRONOUS,
        required=True,
        document="schedule_name",
        extent=f"names; usually {', '.join(USUAL_SCHEDULES)}, and dualpipev of models with experts. Core: the first "
        "three. Wide: every one that flushes",
        left_out="schedules that few use",
    )
    chunks: int = decision(
        1,
        "Model chunks per device.",
        Level.SCHEDULE,
        most=1000,
        required=True,
        extent="1 for schedules that are not looped; every divisor of the layers of the fullest rank. Core: only "
        "where ranks have as many layers. A limit may name other counts",
    )
    attention: Attention | None = decision(
        Attention.RING,
        "How the ranks of a context group compute attention.",
        Level.FAMILY,
        values=tuple(Attention),
        usual=(Attention.RING,),
        wide=tuple(Attention),
        matters=lambda layout: layout.context > 1,
        parse=lambda word: word and Attention(word),
        absent=None,
        extent="usually a ring. Wide: all",
        left_out="context parallelism by all-to-all or gathered keys",
    )
    zero: int = decision(
        0,
        "Shared by data ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.",
        Level.STATE,
        values=ZERO_STAGES,
        core=(0, 1),
        usual=ZERO_STAGES,
        required=True,
        extent="all levels. Core: 0 and 1",
    )
    reshard_after_forward: bool = decision(
        True,
        "With zero 3, parameters are given up after forward and gathered again for backward.",
        Level.STATE,
        core=(True,),
        usual=(True, False),
        words="parameters kept after forward",
        needs=("zero", (3,)),
        extent="both. Core: on",
    )
    offload: Offloading = decision(
        NO_OFFLOADING,
        "What is kept in host memory: names, or fractions by name.",
        Level.STATE,
        words=lambda offload: f"{offload} on the host",
        parse=offloading,
        extent="nothing; where nothing fits without, and wide, half of the optimizer states, and all. A limit may "
        "name any `Offloading`",
        left_out="offload",
    )
    gradient_reduction: str = decision(
        "all_reduce",
        "Who sums gradients over the data axis: all its ranks, or a central server.",
        Level.STATE,
        values=GRADIENT_REDUCTIONS,
        words="gradients summed by a parameter server",
        needs=("zero", (0,)),
        because=", for with ZeRO every rank keeps the sum of its share",
        extent="``all_reduce`` unless a limit names others",
        left_out="parameter servers",
        never_tried=True,
    )
    overlap_gradients: bool = decision(
        True,
        level=Level.STATE,
        required=True,
        words="gradients reduced after backward",
        matters=lambda layout: layout.replicas > 1,
        extent="on unless a limit says otherwise",
        left_out="gradients reduced after backward",
        never_tried=True,
    )
    sequence_parallel: bool = decision(
        False,
        level=Level.FAMILY,
        usual=(False, True),
        required=True,
        words="sequence parallel",
        extent="both",
    )
    overlap_tensor: bool = decision(
        False,
        "Gathers and scatters of sequence parallelism run beside the products that need or make them.",
        Level.PASS,
        core=(False,),
        usual=(False, True),
        words="tensor communication beside products",
        matters=lambda layout: layout.sequence_parallel,
        extent="both. Core: off",
    )
    scatter_gather: bool = decision(
        False,
        "A stage boundary crosses in one slice a tensor rank and is gathered behind it.",
        Level.GROUP,
        wide=(False, True),
        words="stage boundaries crossed in slices",
        matters=lambda layout: (
            layout.pipeline > 1 and layout.tensor > 1 == layout.tensor_rows and not layout.sequence_parallel
        ),
        extent="off. Wide: both",
    )
    recompute: Recomputation = decision(
        Recompute.NONE,
        "For all layers, the first of every stage, by operator, or one of these a stage.",
        Level.PASS,
        words=lambda recompute: f"{recompute} recompute",
        parse=recomputation,
        required=True,
        extent="none, activations alone, selective, full, and full of a quarter, half and three quarters of a "
        "stage's layers, the first ones. Core: none, selective and full. Wide: also selective of some layers. A limit "
        "may name any number",
    )
    placement: tuple[int, ...] = decision(
        (),
        "The device of every rank, in order of rank.",
        Level.FAMILY,
        words="ranks not placed in order",
        parse=lambda devices: tuple(map(int, devices)),
    )
    embeddings: Embeddings = decision(
        NO_EMBEDDINGS,
        "Where embedding tables are: one word for all, or placements by table.",
        Level.FAMILY,
        words=str,
        parse=parse_embeddings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(StepDecisions):
    """The plan as a user writes it: degrees and choices, from which `complete` makes a `Plan`.

    The other fields are those of `StepDecisions`.

    Parameters
    ----------
    data, tensor, pipeline
        Ranks along the three usual axes.
    context
        Ranks that share the tokens of each sequence.
    expert
        How many of the ranks along ``data`` share the experts.
    tensor_rows
        Rows of a grid of tensor-parallel ranks whose columns are ``tensor`` (`meshwise.strategies.plan.parallelism`).
    zero_shards
        The number of neighbouring data ranks that share states, together with their context ranks; 0 for all.
    order
        Axes of the mesh from the outermost to the innermost: neighbours along the last axis are
        neighbours on the machine. Axes of one rank may be left out, and so may ``replica``, which then lies
        just outside ``data``.
    stages
        ``"even"``, ``"balanced"`` or the number of layers of every stage.
    """

    data: int = decision(1, level=Level.DEGREE, extent="every divisor of the number of devices")
    tensor: int = decision(1, level=Level.DEGREE, extent="every divisor of the number of devices")
    pipeline: int = decision(1, level=Level.DEGREE, extent="every divisor of the number of devices")
    context: int = decision(
        1,
        "Ranks that share the tokens of each sequence.",
        Level.DEGREE,
        extent="every divisor that leaves each rank 2,048 tokens. Core: 1",
    )
    expert: int = decision(
        1, "Ranks, of those along data, that share the experts.", Level.DEGREE, extent="every divisor of the experts"
    )
    tensor_rows: int = decision(
        1,
        "Rows of a grid of tensor-parallel ranks, of which tensor is the columns.",
        Level.DEGREE,
        extent="1 unless a limit names others",
        left_out="2-D tensor parallelism",
        never_tried=True,
    )
    zero_shards: int = decision(
        0,
        "Neighbouring data ranks that share states; 0 for all of them.",
        Level.FAMILY,
        least=0,
        matters=lambda layout: layout.zero >= 1,
        extent="all data ranks (0), or those of a node. Core: all",
        left_out="states shared by other data ranks than all or a node's",
        never_tried=True,
    )
    order: tuple[str, ...] = decision(
        AXES,
        "Axes from the outermost to the innermost; those of one rank may be left out.",
        Level.FAMILY,
        extent="`meshwise.strategies.plan.mesh.AXES` unless a limit names others",
        left_out="other orders of axes",
        never_tried=True,
    )
    stages: str | tuple[int, ...] = decision(
        "even",
        level=Level.SCHEDULE,
        extent="``even`` where stages divide the layers and ``balanced`` where not; also one layer less at both ends "
        "(`meshwise.strategies.plan.partition.share_ends`) where no stage has more then; and on devices of different "
        "speed also ``paced``: layers in proportion to it. Core: without that of the ends. A limit may name the "
        "words, and counts a stage",
        left_out="stages of other sizes but near the best plan",
        never_tried=True,
    )

    __repr__ = brief_repr()

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return prod(getattr(self, name) for name in RANK_DEGREES)

    @property
    def model_ranks(self) -> int:
        """The number of ranks that hold one copy of the model: the product of all degrees but ``data``."""
        return prod(getattr(self, name) for name in RANK_DEGREES if name != "data")

    @property
    def sequence_ranks(self) -> int:
        """The number of ranks that share each sequence."""
        return prod(getattr(self, name) for name in SEQUENCE_AXES)

    @property
    def replicas(self) -> int:
        """The number of ranks that sum gradients of the same parameters outside experts: data and sequence ranks."""
        return self.data * self.sequence_ranks

    @property
    def shards(self) -> int:
        """The number of ranks over which ZeRO shares states of parameters outside experts."""
        return (self.zero_shards or self.data) * self.sequence_ranks

    @property
    def replica(self) -> int:
        """The number of groups of data ranks that share states."""
        return self.data // (self.zero_shards or self.data)

    @property
    def sequences(self) -> int:
        """Sequences of one microbatch over all data ranks."""
        return self.data * self.microbatch if isinstance(self.microbatch, int) else sum(self.microbatch)

    @property
    def sequences_text(self) -> str:
        """The sequences of one microbatch over all data ranks, as a formula for messages."""
        if isinstance(self.microbatch, int):
            return f"(data({self.data}) * microbatch({self.microbatch}))"
        return f"sum(microbatch{list(self.microbatch)})"


def _list_decisions() -> dict[str, Decision]:
    """Return the decisions of a layout by name, the decisions about the mesh first."""
    step = [item.name for item in fields(StepDecisions)]
    # the sort is stable: within both parts decisions stay in the order of their declaration
    items = sorted(fields(Layout), key=lambda item: item.name in step)
    return {item.name: Decision(item.name, item.default, **item.metadata) for item in items}


DECISIONS = _list_decisions()
"""Every decision of a layout, by name."""

STEP_DECISIONS = tuple(DECISIONS[item.name] for item in fields(StepDecisions))
"""The decisions that a complete plan has as fields; its mesh and stages have the others."""

UNLIMITED = ("placement", "embeddings")
"""The decisions that a space does not limit: instead of the placement it limits the number of devices, and tables are
placed by an algorithm of their own."""

DEGREES = tuple(name for name, item in DECISIONS.items() if item.level is Level.DEGREE)
"""The degrees of parallelism."""

RANK_DEGREES = tuple(name for name in DEGREES if name != "expert")
"""The degrees whose product is the number of ranks: expert ranks lie along ``data``."""

CUT_DECISIONS = (*(name for name in DEGREES if name not in ("data", "pipeline")), "sequence_parallel", "attention")
"""The decisions that determine which dims of operators are cut."""

MESH_DEGREES = tuple(name for name in AXES if name != REPLICA)
"""The degrees that are axes of the mesh, outermost first."""


def names_at(*levels: Level) -> tuple[str, ...]:
    """Return the names of the decisions that a search takes at the given levels."""
    return tuple(name for name, item in DECISIONS.items() if item.level in levels)


def step_decisions(value: StepDecisions) -> dict[str, Any]:
    """Return the decisions that a layout and its complete plan have in common, by name."""
    return {item.name: getattr(value, item.name) for item in STEP_DECISIONS}


_MAX_NUMBERS = 16
"""How many numbers a message names one by one."""


class Violation(NamedTuple):
    """Why a layout is illegal: the field to blame, and a message with the rule, the value and the nearest legal value.

    The field ``schedule.2`` is line 2, counted from 0, of a written order.
    """

    field: str
    message: str


def format_numbers(numbers: Sequence[int]) -> str:
    """Return numbers as text for a message: all of them, or the first ones and the last.

    >>> format_numbers((3, 3, 1))
    '[3, 3, 1]'
    >>> format_numbers(range(400_000))
    '[0, 1, 2, 3, 4, 5, 6, 7, ..., 399999]'
    """
    if len(numbers) <= _MAX_NUMBERS:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[: _MAX_NUMBERS // 2]))}, ..., {numbers[-1]}]"
