"""How many examples a property is shown: few enough for every change, and many by command."""

from hypothesis import settings

LONG = settings.default.max_examples >= 1000
"""Whether this is the long run."""


def examples(number: int) -> settings:
    """Return settings for so many examples, or for those of ``--hypothesis-profile long`` where they are more."""
    return settings(max_examples=max(number, settings.default.max_examples), deadline=None)
