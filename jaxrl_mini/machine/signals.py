"""What asks a process to stop, and what it says when it does."""

import signal
from types import FrameType
from typing import NoReturn

NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""A person, the system, a terminal that closes, a batch system that needs the machine."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; the message says how to go on."""

    def __init__(self, number: int, message: str = ""):
        super().__init__(message)
        self.number = number


def not_ignored() -> list[int]:
    """Those of `NUMBERS` that are not ignored, as `nohup` has SIGHUP, or handled by what is not Python."""
    return [number for number in NUMBERS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def interrupt(number: int, frame: FrameType | None = None) -> NoReturn:
    """A handler that ends what the process does."""
    raise Interrupted(number)
