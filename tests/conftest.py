"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

import rajax
import rajax.smollm2


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's checkpoint; downloaded and converted where the cache lacks it."""
    return rajax.smollm2.checkpoint()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> tuple[rajax.Llama, rajax.Tokenizer]:
    """The demo model in float32, and its tokenizer."""
    return rajax.load(smollm2_path, dtype="float32"), rajax.load_tokenizer(smollm2_path)
