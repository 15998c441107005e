"""How a jitted step finds the host memory of its request: by a small integer, so that one compiled step serves all."""

from __future__ import annotations

import itertools
import threading
from typing import Any

_requests: dict[int, Any] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()


def register(store: Any) -> int:
    """Makes a request's store known; returns its handle."""
    with _lock:
        handle = next(_numbers)
        _requests[handle] = store
    return handle


def unregister(handle: int) -> None:
    """Forgets a request that has ended."""
    with _lock:
        _requests.pop(handle, None)


def by_handle(handle: int) -> Any | None:
    """The store of a request, or None where the request has ended, as an interrupted one may before its step."""
    with _lock:
        return _requests.get(handle)
