"""A log that stays short while something is wrong for long. Counts nothing: metrics do."""

import logging
import math
import time
from collections.abc import Callable

_AGAIN_S = 60.0
_MAX_TEXTS = 1000


class Repeats(logging.Filter):
    """Lets a warning or error with the same text pass once a minute. An error of the machine, such
    as a lack of descriptors, is one line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        if record.exc_info and isinstance(record.exc_info[1], OSError):
            text = f"{text.partition(chr(10))[0]}: {record.exc_info[1]}"
            record.msg, record.args, record.exc_info = text, (), None
        now_s = self._clock()
        if now_s - self._passed_s.get(text, -math.inf) < _AGAIN_S:
            return False
        if len(self._passed_s) >= _MAX_TEXTS:
            self._passed_s.clear()
        self._passed_s[text] = now_s
        return True
