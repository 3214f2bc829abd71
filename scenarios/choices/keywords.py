"""The best setup from Python: keywords in the place of options."""

from typing import Any

from meshwise.scenarios.choices.question import PARSERS, make_question
from meshwise.scenarios.choices.setup_choice import Choice, choose_setup
from meshwise.scenarios.scenario import SEARCH_SECONDS, Scenario

FRONT = "front"
"""The keyword that asks for the best plan of every setup."""


def split_options(scenario: Scenario, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a scenario and keywords ask of a run, and the other keywords; keywords replace the scenario's."""
    names = {*PARSERS, FRONT}
    keywords = {name: value for name, value in options.items() if name in names and value not in (None, False)}
    rest = {name: value for name, value in options.items() if name not in names}
    return dict(scenario.search_settings.asked) | keywords, rest


def search_setups(scenario: Scenario, asked: dict[str, Any], options: dict[str, Any]) -> Choice:
    """Return the best setup of a scenario for what is ``asked``; other ``options`` are ``seconds`` and ``target``."""
    seconds, target = options.pop("seconds", None), options.pop("target", None)
    refuse_options(asked, options)
    question = make_question(
        {name: value for name, value in asked.items() if name != FRONT}, compares=bool(asked.get(FRONT))
    )
    assert question is not None, "something is asked"
    scenario = scenario if target is None else scenario.for_target(target)
    limit = scenario.limit_seconds(None, seconds)
    return choose_setup(scenario, question, SEARCH_SECONDS if limit is None else limit)


def refuse_options(asked: dict[str, Any], options: dict[str, Any], prefix: str = "") -> None:
    """Raise ``ValueError`` where options are given that a choice of setups does not take."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{prefix}{name} is for searches of the least time on one machine, met {value} beside "
                f"{', '.join(asked)}, which ask for the best machine of a run"
            )
