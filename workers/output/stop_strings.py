"""Finds the first stop string in a text as it comes, and holds back what may begin one. Takes time
linear in the text, however many they are (Aho and Corasick, "Efficient string matching", 1975)."""

import functools


class Automaton:
    """States are what the text so far ends with; 0 at its beginning."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self.num_begun = [0]  # by state: the characters at the end that may begin a stop string
        self.num_found = [0]  # by state: the length of the longest stop string at the end
        for stop in stops:
            state = 0
            for depth, char in enumerate(stop, 1):
                state = self._next.setdefault((state, char), len(self.num_begun))
                if state == len(self.num_begun):
                    self.num_begun.append(depth)
                    self.num_found.append(0)
            self.num_found[state] = len(stop)
        self._shorter = [0] * len(self.num_begun)  # the state of the longest proper end
        steps = sorted(self._next.items(), key=lambda step: self.num_begun[step[1]])
        for (state, char), found in steps:
            if state:
                self._shorter[found] = self.after(self._shorter[state], char)
            self.num_found[found] = self.num_found[found] or self.num_found[self._shorter[found]]

    def after(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (found := self._next.get((state, char))) is None and state:
            state = self._shorter[state]
        return found or 0


@functools.lru_cache(16)  # the choices of a job, and the jobs of a program, have the same
def automaton(stops: tuple[str, ...]) -> Automaton:
    return Automaton(stops)


class StopStrings:
    """`is_on`: whether the text is searched; a reasoning is not. `shows_stop`: the stop string is
    part of the text."""

    def __init__(
        self, stop: tuple[str, ...] = (), min_tokens: int = 0, *, shows_stop: bool = False
    ) -> None:
        self.is_on = True
        self.found = ""  # the stop string at which the text has ended
        self._shows_stop = shows_stop
        self._automaton = automaton(stop) if stop else None
        self._state = 0
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # possibly the start of a stop string

    def count(self) -> None:
        """Another token has come: the text of the first `min_tokens` is not searched."""
        self._num_tokens += 1

    def push(self, piece: str) -> str:
        """Returns the text that this releases, up to a stop string, which is then `found`."""
        stops = self._automaton
        if self._num_tokens <= self._min_tokens or not self.is_on or stops is None:
            return piece
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            self._state = stops.after(self._state, char)
            if num := stops.num_found[self._state]:
                self.found, self._held = text[end - num : end], ""
                return text[: end if self._shows_stop else end - num]
        cut = len(text) - (0 if self._shows_stop else stops.num_begun[self._state])
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Returns the text held back, which is the start of no stop string."""
        text, self._held = self._held, ""
        return text
