"""Fixtures that several test modules share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rajax
import rajax.smollm2

# `python -m pytest` puts the repository's root there, where `import kernels` would find our folder and
# transformers take it for Hugging Face's package.
ROOT = Path(__file__).parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's checkpoint; downloaded and converted where the cache lacks it."""
    return rajax.smollm2.checkpoint()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> tuple[rajax.Llama, rajax.Tokenizer]:
    """The demo model in float32, and its tokenizer."""
    return rajax.load(smollm2_path, dtype="float32"), rajax.load_tokenizer(smollm2_path)
