"""Stamps log lines with the batching configuration, and logs repeated errors once."""

import logging


class _Stamp(logging.Filter):
    """Adds `batching=<version>` to a log line if there is a version."""

    version = ""

    def filter(self, record: logging.LogRecord) -> bool:
        mark = f" batching={self.version}"
        if self.version and not str(record.msg).endswith(mark):
            record.msg = f"{record.msg}{mark}"
        return True


class Complaint:
    """Logs an error that repeats only once, until it changes."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._said = ""

    def note(self, exc: Exception) -> None:
        if str(exc) != self._said:
            self._log.error("%s: %s", self._what, exc)
        self._said = str(exc)

    def clear(self) -> None:
        """The last try succeeded."""
        self._said = ""


_stamp = _Stamp()


def stamp(batching_version: str) -> None:
    """Adds this version to all further log lines of the process; empty: none."""
    _stamp.version = batching_version
    for handler in logging.getLogger().handlers:
        if _stamp not in handler.filters:
            handler.addFilter(_stamp)
