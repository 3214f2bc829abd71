"""Damage is found before states are read."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.saving.digests import DIGESTS
from meshwise.executor.stages.parallelize import parallelize

BATCH = torch.ones(4, 3)


@pytest.mark.parametrize("name", [".metadata", "facts.json", "__0_0.distcp", DIGESTS])
def test_a_changed_byte_is_found_before_states_are_read(tmp_path: Path, name: str) -> None:
    def build() -> object:
        torch.manual_seed(0)
        return parallelize(torch.nn.Linear(3, 2), loss=lambda outputs, batch: outputs.square().mean())

    step = build()
    for _ in range(2):
        step(BATCH)
        newest = step.save(tmp_path)
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / name).write_bytes(content)
    again = build()
    with pytest.raises(UserError, match=r"step-00000002.*(the SHA-256 that|cannot be read|names files|has version)"):
        again.load(tmp_path)
        again(BATCH)
    (newest / name).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        again.load(tmp_path)
        again(BATCH)


def test_the_checkpoint_before_a_damaged_one_is_named(tmp_path: Path) -> None:
    step = parallelize(torch.nn.Linear(3, 2), loss=lambda outputs, batch: outputs.square().mean())
    for _ in range(2):
        step(BATCH)
        newest = step.save(tmp_path)
    (newest / "__0_0.distcp").write_bytes(b"none")
    with pytest.raises(UserError, match="nearest: step-00000001, once step-00000002 is removed"):
        step.load(tmp_path)
