"""Several threads at once."""

import threading
from collections.abc import Callable


def at_once(work: Callable[[], None], count: int = 4) -> None:
    """Calls work in so many threads, and waits for all."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
