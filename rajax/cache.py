"""Where RAJAX keeps what it can make again: the demo model and compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$RAJAX_CACHE, or rajax under the user's cache directory."""
    if os.environ.get("RAJAX_CACHE"):
        return Path(os.environ["RAJAX_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rajax"


def keep_compiled_programs() -> None:
    """Has JAX, which must not have been imported yet, keep what it compiles for the next process.

    What is set in the environment already stays. Programs with host callbacks are not kept: JAX cannot.
    """
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir() / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
