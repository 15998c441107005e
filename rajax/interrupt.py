"""Ctrl-C for the command line, at moments when it can be taken."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupt:
    """Ctrl-C as KeyboardInterrupt, but not in the middle of an import or a decode step.

    A step calls back from XLA. There the exception would come out as another one or get lost, and a step that
    is left behind would call a Python that has ended. JAX's libraries end the process when their import fails.

    Attributes:
      came: Ctrl-C came. It may have been lost, in a destructor, or made into another exception.
    """

    def __init__(self) -> None:
        self.came = self._held = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Takes Ctrl-C for the time of the block."""
        # A shell's background job ignores it, and only the main thread hears of it.
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return
        self.came = self._held = False
        signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _take(self, *_: object) -> None:
        self.came = True
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt where Ctrl-C came."""
        if self.came and not self._held:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Ctrl-C waits for the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()


interrupt = Interrupt()
