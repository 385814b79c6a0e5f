"""Repairs the append-only file of a Redis after a power loss.

The writes of a function are stored as MULTI … EXEC. If the file ends inside such a block, Redis 7.0
(and every other server tried but Valkey 9.1.2) drops only the last command, keeps the open MULTI
and appends to it; the next start then runs half of the function. So servers that we start do not
repair the file themselves (`aof-load-truncated no`): they stop, the whole block is cut off here,
and they are started again.

The servers' own tool is not used: Valkey 9.1's rejects Valkey 9.1's base file, and all of them cut
off everything after a block that an earlier start left open.
"""

import os
from pathlib import Path
from typing import BinaryIO

# The last message of a server whose file ends inside a write.
ENDS_EARLY = "Unexpected end of file reading the append only file"


def cut_off_unfinished_write(data_dir: Path) -> None:
    """Truncates the newest file after its last complete command or block."""
    directory = data_dir / "appendonlydir"
    manifest = (directory / "appendonly.aof.manifest").read_text().split("\n")
    # `file <name> seq <number> type <b, h or i>`, in the order in which they are read
    *_, newest = (directory / line.split()[1] for line in manifest if line.endswith("type i"))
    with newest.open("r+b") as file:
        file.truncate(_end_of_whole_writes(file))
        os.fsync(file.fileno())


def _end_of_whole_writes(file: BinaryIO) -> int:
    """Returns an offset in bytes. A MULTI inside an open block means that an earlier start left the
    block open: servers run it with the next one, so it counts as complete."""
    end, is_open = 0, False
    while True:
        begin = file.tell()
        name = _next_command(file)
        if name is None:
            return end
        if name == b"MULTI":
            end, is_open = begin, True
        elif name == b"EXEC":
            is_open = False
        if not is_open:
            end = file.tell()


def _next_command(file: BinaryIO) -> bytes | None:
    """Reads a command or timestamp; returns its first word, or None if it is incomplete."""
    line = file.readline()
    if not line.endswith(b"\r\n"):
        return None
    name = line[:-2]
    if line.startswith(b"*"):
        for number in range(int(line[1:])):
            num_bytes = _length(file.readline())
            word = file.read(num_bytes)
            if len(word) < num_bytes or not num_bytes:
                return None
            name = word[:-2] if number == 0 else name
    return name.upper()


def _length(line: bytes) -> int:
    """The bytes of the following word including its line end; 0 if the line is incomplete."""
    return int(line[1:]) + 2 if line.endswith(b"\r\n") else 0
