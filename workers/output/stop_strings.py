"""Finds stop strings in a growing text, in time linear in it, however many they are (Aho and
Corasick, "Efficient string matching", 1975)."""

import functools


class StopStrings:
    """States are what the text so far ends with; 0 at its beginning."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self.num_begun = [0]  # by state: the characters at the end that may begin a stop string
        self.num_found = [0]  # by state: the length of the longest stop string at the end
        for stop in stops:
            state = 0
            for depth, char in enumerate(stop, 1):
                found = self._next.setdefault((state, char), len(self.num_begun))
                if found == len(self.num_begun):
                    self.num_begun.append(depth)
                    self.num_found.append(0)
                state = found
            self.num_found[state] = len(stop)
        self._shorter = [0] * len(self.num_begun)  # the state of the longest proper end
        for (state, char), found in sorted(
            self._next.items(), key=lambda step: self.num_begun[step[1]]
        ):
            if state:
                self._shorter[found] = self.after(self._shorter[state], char)
            self.num_found[found] = self.num_found[found] or self.num_found[self._shorter[found]]

    def after(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (found := self._next.get((state, char))) is None and state:
            state = self._shorter[state]
        return found or 0


@functools.lru_cache(16)  # the choices of a job, and the jobs of a program, have the same
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    return StopStrings(stops)
