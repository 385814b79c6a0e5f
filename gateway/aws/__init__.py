"""The gateway on AWS Lambda: its events and answers. The app itself is `gateway.http.app`.

A caller waits for its imports. The garbage collector waits until `imports_are_done`: they make
120,000 objects and no garbage. It never examines these later.
"""

import gc

_THRESHOLDS = gc.get_threshold()


def imports_are_done() -> None:
    """Garbage is collected as ever. Every entry point calls it before it answers anybody."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


gc.set_threshold(150_000)
