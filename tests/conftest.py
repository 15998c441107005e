"""Fixtures that several test modules share."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

import rajax
import rajax.smollm2

# `python -m pytest` puts the repository's root there, where `import kernels` would find our folder and
# transformers take it for Hugging Face's package.
ROOT = Path(__file__).parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

# Numba compiles a function anew when its own file changes, but not when one does that it takes others from.
newest = max(p.stat().st_mtime for p in (*ROOT.glob("kernels/*.py"), ROOT / "rajax" / "exact_attention.py"))
for kept in ROOT.glob("*/__pycache__/*.nb[ic]"):
    with contextlib.suppress(FileNotFoundError):  # several processes do this
        if kept.stat().st_mtime < newest:
            kept.unlink()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's checkpoint; downloaded and converted where the cache lacks it."""
    return rajax.smollm2.checkpoint()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> tuple[rajax.Llama, rajax.Tokenizer]:
    """The demo model in float32, and its tokenizer."""
    return rajax.load(smollm2_path, dtype="float32"), rajax.load_tokenizer(smollm2_path)
