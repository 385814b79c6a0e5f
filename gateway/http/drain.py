"""The end of a gateway's life: streams may end by themselves for a while, then are told to go."""

import time


class StreamDrain:
    """Begun once, by the server's shutdown."""

    def __init__(self) -> None:
        self._over_at_s: float | None = None

    def begin(self, budget_s: float) -> None:
        if self._over_at_s is None:
            self._over_at_s = time.monotonic() + budget_s

    @property
    def has_begun(self) -> bool:
        return self._over_at_s is not None

    @property
    def is_over(self) -> bool:
        """Whether streams must end now."""
        return self._over_at_s is not None and time.monotonic() >= self._over_at_s
