"""Mends the append-only file of a Redis that lost its power.

What a function writes stands in the file as MULTI … EXEC. Where the file ends inside such a block,
Redis 7.0 (and every other server that was tried but Valkey 9.1.2) drops the last command alone,
keeps the open MULTI and writes on behind it; the next start then runs half of the function. So a
server that we start is told not to mend the file itself (`aof-load-truncated no`): it stops, the
whole block is cut off here, and it is started again.

The servers' own tool is not used: Valkey 9.1's does not know Valkey 9.1's own base file, and a
block that an earlier start left open makes each of them cut off all that came after it.
"""

import os
from pathlib import Path
from typing import BinaryIO

# The last words of a server that found the end of its file in the middle of a write.
ENDS_EARLY = "Unexpected end of file reading the append only file"


def cut_off_unfinished_write(data_dir: Path) -> None:
    """Ends the newest file behind its last whole command or block."""
    directory = data_dir / "appendonlydir"
    manifest = (directory / "appendonly.aof.manifest").read_text().split("\n")
    # `file <name> seq <number> type <b, h or i>`, in the order in which they are read
    *_, newest = (directory / line.split()[1] for line in manifest if line.endswith("type i"))
    with newest.open("r+b") as file:
        file.truncate(_end_of_whole_writes(file))
        os.fsync(file.fileno())


def _end_of_whole_writes(file: BinaryIO) -> int:
    """In bytes. A MULTI in an open block shows that the block was left open by an earlier start:
    servers run it with the next one, so it counts as whole."""
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
    """Reads a command, or the note of a time; its first word, or None where it is not whole."""
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
    """Bytes of the word that follows, with its line's end; 0 where the line is not whole."""
    return int(line[1:]) + 2 if line.endswith(b"\r\n") else 0
