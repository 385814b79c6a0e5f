"""Finds the first stop string in a text as it comes, and holds back what may begin one."""

from collections.abc import Sequence


class StopStrings:
    """`is_on`: whether the text is searched; a reasoning is not."""

    def __init__(self, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.is_on = True
        self.is_stopped, self.found = False, ""
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # possibly the start of a stop string

    def count(self) -> None:
        """Another token has come: the text of the first `min_tokens` is not searched."""
        self._num_tokens += 1

    def push(self, text: str) -> str:
        """Returns the text that this releases. Sets `is_stopped` after a stop string, `found`."""
        if self._num_tokens <= self._min_tokens or not (self.is_on and self._stop):
            return text
        text = self._held + text
        starts = [(start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if starts:
            start, self.found = min(starts)
            self.is_stopped, self._held = True, ""
            return text[:start]
        cut = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Returns the text held back, which is the start of no stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
