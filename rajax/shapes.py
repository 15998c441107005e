"""The few array lengths that programs are compiled for."""

from __future__ import annotations

BLOCK = 512
"""Positions per prefill step: on a CPU the fastest of 128 to 2048, and large enough to fill a GPU."""


def bucket(length: int, parts: int = 16) -> int:
    """`length` rounded up so that few compilations serve all lengths; above 4,096 by a share of 2 / `parts` at most."""
    for small in (128, 256, BLOCK):
        if length <= small:
            return small
    granule = max(BLOCK, (1 << (length - 1).bit_length()) // parts)
    return -(-length // granule) * granule
