"""Says in every log line of a process which batching configuration is in force."""

import logging


class _Stamp(logging.Filter):
    """Adds `batching=<version>` to a line, once, where there is a version."""

    version = ""

    def filter(self, record: logging.LogRecord) -> bool:
        mark = f" batching={self.version}"
        if self.version and not str(record.msg).endswith(mark):
            record.msg = f"{record.msg}{mark}"
        return True


_stamp = _Stamp()


def stamp(batching_version: str) -> None:
    """From now on the lines of this process carry this version; empty: none."""
    _stamp.version = batching_version
    for handler in logging.getLogger().handlers:
        if _stamp not in handler.filters:
            handler.addFilter(_stamp)
