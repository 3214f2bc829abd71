"""The small files, written by hand, of every trainer."""

from . import test_accelerate, test_deepspeed, test_megatron, test_nanotron, test_torchtitan

GOLDEN = {
    "torchtitan": test_torchtitan.FILE,
    "megatron": test_megatron.FILE,
    "deepspeed": test_deepspeed.FILE,
    "accelerate": test_accelerate.FILE,
    "nanotron": test_nanotron.FILE,
}
