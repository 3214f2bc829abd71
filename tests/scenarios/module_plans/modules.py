"""The figures of a module of two blocks, whose steps can be worked out by hand."""

from meshwise.executor.module_measures.figures import BlockFigures, ModuleFigures

KIB = 1024
SIZES = ((16, 16), (16,))
"""Shapes of the parameters of a block: 272 elements."""
BLOCK_ELEMENTS = 272


def build_figures(**changes: object) -> ModuleFigures:
    """Return figures of passes of 2 ms and 0.5 ms a sample, half of them forward, nine tenths of it in blocks."""
    head = BlockFigures("", 0.1e-3, 0.0, 0, 4 * KIB, saves_input=False, shapes=())
    blocks = tuple(
        BlockFigures(f"layers.{place}", 0.9e-3, 0.9e-3, 16 * KIB, 4 * KIB, saves_input=True, shapes=SIZES)
        for place in range(2)
    )
    tail = BlockFigures("", 0.1e-3, 0.2e-3, 2 * KIB, 0, saves_input=True, shapes=())
    values = {
        "samples": (2, 8),
        "passes": (3e-3, 6e-3),
        "alone": 6e-3,
        "head": head,
        "blocks": blocks,
        "tail": tail,
        "buffers": 0,
        "batch": 64.0,
        "peak": 8.0 * (2 * 20 + 2 + 4 + 8) * KIB,
        "update": 1e-3,
        "update_launches": 0.4e-3,
        "update_peak": 0.0,
        "state": 2 * 4 * 2 * BLOCK_ELEMENTS,
        "reading": 0.1e-3,
        "read_samples": 8,
        "loop": 0.2e-3,
        "reduction": 0.3e-3,
        "replica": 0.5e-3,
        "units": 4,
        "unit": 0.6e-3,
        "sharded_update": 0.7e-3,
        "whole_batch": "",
        "whole_microbatch": "",
        "whole_states": "",
        "collectives": tuple(
            (name, 2, size, 0.25e-3)
            for name in ("all_reduce", "all_gather", "reduce_scatter", "send")
            for size in (KIB, 16 * KIB)
        ),
    }
    return ModuleFigures(**values | changes)  # type: ignore[arg-type]
