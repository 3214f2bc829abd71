"""`meshwise search` says what is proven of sums of operators' costs, and what memory is worth."""

import pytest

from meshwise.scenarios.commands.search import _describe_proof
from meshwise.strategies.search.proposals import Certificate


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        # 2e-12 s a byte * 2**30 bytes
        (Certificate(0.002, 2e-12), "proven within 0.2 % of the least; 1 GiB more a device saves 2.15 ms a step"),
        (Certificate(0.0, 0.0), "proven the least; memory does not bind"),
        (Certificate(1e-9, None, "layers cut alike"), "proven the least among layers cut alike"),
        (Certificate(None, None), "nothing proven"),
    ],
)
def test_in_words(certificate: Certificate, said: str) -> None:
    assert _describe_proof(certificate) == said
