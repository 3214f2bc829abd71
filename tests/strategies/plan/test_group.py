"""A group is the table of its members: each is one row and one column, those that are not legal are left out."""

from itertools import product

import numpy as np

from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout, StepDecisions
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.recomputation import Recompute

PASSES = (
    StepDecisions(recompute=Recompute.NONE),
    StepDecisions(recompute=Recompute.FULL, overlap_tensor=True),
    StepDecisions(recompute=Recompute.NONE, offload=Offloading(activations=(0.5,))),
)
STATES = (StepDecisions(zero=0), StepDecisions(zero=1, offload=Offloading((1.0,))))


def test_members_are_the_legal_cells_column_by_column() -> None:
    legal = np.array([[True, True], [False, True], [True, False]])
    group = Group(Layout(data=4), PASSES, STATES, legal)
    assert group.num_members == 4
    assert list(group) == [
        group.build_layout(row, column) for column, row in product(range(2), range(3)) if legal[row, column]
    ]


def test_a_member_has_what_its_row_and_its_column_choose_and_the_rest_of_the_layout() -> None:
    group = Group(Layout(data=4, tensor=2), PASSES, STATES, np.ones((3, 2), bool))
    assert group.build_layout(1, 1) == Layout(
        data=4, tensor=2, recompute=Recompute.FULL, overlap_tensor=True, zero=1, offload=Offloading((1.0,))
    )
    # activations of the pass go beside the states that are on hosts
    assert group.build_layout(2, 1).offload == Offloading((1.0,), activations=(0.5,))
    assert group.build_layout(2, 0).offload == Offloading(activations=(0.5,))
