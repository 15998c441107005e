"""How a jitted step finds the host memory of its request: by a small integer, so that one compiled step serves all."""

from __future__ import annotations

import collections
import itertools
import threading
from typing import Any

_requests: dict[int, Any] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()


class Store:
    """The host's part of a request: known by its handle until it is closed, and keeper of what fails in a callback."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self.seconds: dict[str, float] = collections.defaultdict(float)
        """What the host path spent its time on, in seconds: "host_search" and "host_attention"."""
        with _lock:
            self.handle = next(_numbers)
            _requests[self.handle] = self

    def fail(self, failure: BaseException) -> None:
        """Keeps the first exception of a step: thrown through XLA it would lose its type."""
        self._failure = self._failure or failure

    def raise_failure(self) -> None:
        """Raises what `fail` kept, as it was."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Forgets the request."""
        with _lock:
            _requests.pop(self.handle, None)


def by_handle(handle: int) -> Any | None:
    """The store of a request, or None where the request has ended, as an interrupted one may before its step."""
    with _lock:
        return _requests.get(handle)
