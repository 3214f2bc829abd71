"""DualPipeV: bubbles and activations are what its source says, counted action by action."""

import pytest

from meshwise.strategies.schedules.schedule import build_schedule

from .closed_forms import PassSeconds, dualpipev_bubble, dualpipev_in_flight
from .unit_time import ONE, RANKS, counts, held, walk


@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipev_is_as_its_source_says(ranks: int) -> None:
    for microbatches in counts("dualpipev", ranks, 2, 2 * ranks):
        value = build_schedule("dualpipev", ranks, microbatches, 2)
        assert held(value) == [dualpipev_in_flight(rank, ranks, microbatches) for rank in range(ranks)]
        assert walk(value, ONE).bubble == dualpipev_bubble(ranks, microbatches, ONE, pair_seconds=3)
        for times, together in ((ONE, 2), (PassSeconds(3, 4, 2), 9), (PassSeconds(3, 4, 2), 7)):
            assert walk(value, times, together).bubble <= dualpipev_bubble(ranks, microbatches, times, together)
