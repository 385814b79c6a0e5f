"""Adds the version of batching.yaml to log lines."""

import logging


class _Stamp(logging.Filter):
    """Adds `batching=<version>` to each log line if there is a version."""

    version = ""

    def filter(self, record: logging.LogRecord) -> bool:
        mark = f" batching={self.version}"
        if self.version and not str(record.msg).endswith(mark):
            record.msg = f"{record.msg}{mark}"
        return True


_stamp = _Stamp()


def stamp(batching_version: str) -> None:
    """Adds this version to all later log lines of the process; '' adds none."""
    _stamp.version = batching_version
    for handler in logging.getLogger().handlers:
        if _stamp not in handler.filters:
            handler.addFilter(_stamp)
