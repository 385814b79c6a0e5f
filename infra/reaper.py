"""Ends an embedded Redis whose owner was killed.

`python reaper.py DIRECTORY`, with the owner's pipe as standard input: when that ends and the
directory still exists, shuts down the server on its socket and removes the directory. Uses only the
standard library, so that it starts fast and stays small.
"""

import os
import shutil
import socket
import sys
import time

_GIVE_UP_AFTER_S = 10.0  # a server that was just started opens its socket within this time


def main(directory: str) -> None:
    """Waits for the owner's end, then cleans up what it left."""
    while os.read(0, 1):
        pass
    give_up_at = time.monotonic() + _GIVE_UP_AFTER_S
    while os.path.isdir(directory) and time.monotonic() < give_up_at:
        if _shut_down(os.path.join(directory, "redis.sock")):
            break
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


def _shut_down(path: str) -> bool:
    """Whether a server accepted the shutdown; it flushes its append-only file first."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_GIVE_UP_AFTER_S)
        try:
            sock.connect(path)
            sock.sendall(b"SHUTDOWN NOSAVE\r\n")
            return sock.recv(64) == b""  # any answer is a refusal
        except ConnectionResetError:
            return True
        except OSError:
            return False


if __name__ == "__main__":
    main(sys.argv[1])
