"""Ctrl-C and SIGTERM at a good moment: after the update that is being computed."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any


class Interrupt:
    """In this context the first Ctrl-C or SIGTERM only sets `requested`; the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this update; once more to stop at once", file=sys.stderr, flush=True)
