"""Ends an embedded Redis whose owner was killed and could not do so itself.

`python reaper.py DIRECTORY`, with the owner's pipe as standard input: when that ends and the
directory is still there, shuts the server on its socket down and removes the directory. Run as a
file, on the standard library alone, so that it starts in milliseconds and weighs little.
"""

import os
import shutil
import socket
import sys
import time

_GIVE_UP_AFTER_S = 10.0  # a server that has just been started opens its socket within that


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
    """Whether a server took the order; its append-only file is flushed before it ends."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_GIVE_UP_AFTER_S)
        try:
            sock.connect(path)
            sock.sendall(b"SHUTDOWN NOSAVE\r\n")
            return sock.recv(64) == b""  # an answer would be a refusal
        except ConnectionResetError:
            return True
        except OSError:
            return False


if __name__ == "__main__":
    main(sys.argv[1])
