"""What a worker's log lines carry, the batching configuration in force, and what is said once."""

import logging


class _Stamp(logging.Filter):
    """Adds `batching=<version>` to a line, once, where there is a version."""

    version = ""

    def filter(self, record: logging.LogRecord) -> bool:
        mark = f" batching={self.version}"
        if self.version and not str(record.msg).endswith(mark):
            record.msg = f"{record.msg}{mark}"
        return True


class Complaint:
    """Says in the log what goes wrong with each try of something, once until that changes."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._said = ""

    def note(self, exc: Exception) -> None:
        if str(exc) != self._said:
            self._log.error("%s: %s", self._what, exc)
        self._said = str(exc)

    def clear(self) -> None:
        """It has gone well."""
        self._said = ""


_stamp = _Stamp()


def stamp(batching_version: str) -> None:
    """From now on the lines of this process carry this version; empty: none."""
    _stamp.version = batching_version
    for handler in logging.getLogger().handlers:
        if _stamp not in handler.filters:
            handler.addFilter(_stamp)
