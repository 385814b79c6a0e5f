"""Adds the version of batching.yaml to log lines, and logs repeated errors once."""

import logging


class _Stamp(logging.Filter):
    """Adds `batching=<version>` to each log line if there is a version."""

    version = ""

    def filter(self, record: logging.LogRecord) -> bool:
        mark = f" batching={self.version}"
        if self.version and not str(record.msg).endswith(mark):
            record.msg = f"{record.msg}{mark}"
        return True


class ErrorOnce:
    """Logs an error once, and again only if its message has changed."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._last = ""

    def note(self, exc: Exception) -> None:
        if str(exc) != self._last:
            self._log.error("%s: %s", self._what, exc)
        self._last = str(exc)

    def clear(self) -> None:
        """Lets the next error be logged in any case, as the last call succeeded."""
        self._last = ""


_stamp = _Stamp()


def stamp(batching_version: str) -> None:
    """Adds this version to all later log lines of the process; '' adds none."""
    _stamp.version = batching_version
    for handler in logging.getLogger().handlers:
        if _stamp not in handler.filters:
            handler.addFilter(_stamp)
