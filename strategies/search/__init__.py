"""Search: one driver, and one algorithm a file."""

from strategies.search.driver import OutOfTime, Progress, Proof, Proposals, SearchAlgorithm, SearchResult, search
from strategies.search.exhaustive import Exhaustive
from strategies.search.mcmc import MCMC
from strategies.search.space import Space, layouts, neighbours

ALGORITHMS: dict[str, type[Exhaustive] | type[MCMC]] = {
    "exhaustive": Exhaustive,
    "mcmc": MCMC,
}
"""Every algorithm by name; the fields of each are its hyper-parameters."""

__all__ = [
    "ALGORITHMS",
    "MCMC",
    "Exhaustive",
    "OutOfTime",
    "Progress",
    "Proof",
    "Proposals",
    "SearchAlgorithm",
    "SearchResult",
    "Space",
    "layouts",
    "neighbours",
    "search",
]
