"""The stages of a start, told with their seconds: those that batchway sees, and those that vLLM's
processes log. They send their log to a socket of this one, whose address they get by a logging
configuration (vLLM's manual, "Logging Configuration"): vLLM's own with one more handler.
"""

import json
import logging.config
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

_CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_MAX_BYTES = 2**16  # of a record
_ERROR, _MAX_REASON = "<11>", 500  # how syslog marks an error of a program; characters
# What vLLM logs at the end of a stage, with its seconds; a CPU's compilation only begins and ends.
_END = re.compile(r"(Loading weights|torch\.compile|Graph capturing).* (?:took|in) ([\d.]+) s")
_NAMES = {"Loading weights": "weights", "torch.compile": "compile", "Graph capturing": "graphs"}
_CPU_BEGINS, _CPU_ENDS = "Warming up model for the compilation", "Warming up done"


class Stages:
    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._cpu_begin_s = 0.0
        self.failure = ""  # what vLLM's processes logged first as an error: its last line

    def progress(self, text: str) -> None:
        """Tells a line; for any thread."""
        with self._lock:
            self._progress(text)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        begin_s = time.monotonic()
        yield
        self.progress(f"{stage}: {time.monotonic() - begin_s:.1f} s")

    def take(self, record: str, now_s: float) -> None:
        """Takes a record of vLLM's log."""
        if record.startswith(_ERROR) and not self.failure:
            self.failure = record.rstrip("\0\n").rpartition("\n")[2][:_MAX_REASON]
        if _CPU_BEGINS in record:
            self._cpu_begin_s = now_s
        elif _CPU_ENDS in record:
            self.progress(f"compile: {now_s - self._cpu_begin_s:.1f} s")
        elif found := _END.search(record):
            self.progress(f"{_NAMES[found[1]]}: {float(found[2]):.1f} s")

    @contextmanager
    def listening(self, vllm_config: dict[str, Any]) -> Iterator[None]:
        """Within it vLLM's new processes log to this one, too. `vllm_config`: how they log. An
        operator's own configuration stays."""
        if os.environ.get(_CONFIG_VARIABLE):
            yield
            return
        with tempfile.TemporaryDirectory(prefix="batchway-") as folder:
            # Datagrams, so that vLLM neither waits for this process nor misses it once it has died.
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            receiver.bind(("127.0.0.1", 0))
            config = deepcopy(vllm_config)
            handler = {"class": "logging.handlers.SysLogHandler", "level": "INFO"}
            config["handlers"]["stages"] = {**handler, "address": receiver.getsockname()}
            logger = config["loggers"]["vllm"]
            logger["handlers"] = [*logger["handlers"], "stages"]
            logger["level"] = "DEBUG" if logger["level"] == "DEBUG" else "INFO"
            os.environ[_CONFIG_VARIABLE] = f"{folder}/logging.json"
            Path(folder, "logging.json").write_text(json.dumps(config), "utf-8")
            logging.config.dictConfig(config)  # for processes that are forked
            threading.Thread(target=self._receive, args=[receiver], daemon=True).start()
            yield

    def _receive(self, receiver: socket.socket) -> None:
        while True:
            self.take(receiver.recv(_MAX_BYTES).decode("utf-8", "replace"), time.monotonic())
