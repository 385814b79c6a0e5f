"""Predicts a sequence's next tokens from its own tokens: those that followed when its last three
tokens occurred before (Saxena, "Prompt Lookup Decoding", 2023)."""

from collections.abc import Collection, Sequence

_NUM_MATCHED = 3
_REMEMBERED = 0.9  # of an earlier answer's weight: it is the last ten that count


class PromptLookup:
    """One sequence's tokens by the three before them, and how often these predicted the next."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # by hash: a collision costs a wrong draft
        self._num_read = _NUM_MATCHED
        self._num_right = 0.0
        self._num_tried = 1.0  # so that the first draft waits for an answer

    @property
    def chance(self) -> float:
        """The share of its last output tokens that drafts predicted, or would have predicted."""
        return self._num_right / self._num_tried

    def read(self, token_ids: Sequence[int], num_prompt: int) -> None:
        """Reads the tokens since the last call, of which the first `num_prompt` are the prompt."""
        for position in range(self._num_read, len(token_ids)):
            key = hash(tuple(token_ids[position - _NUM_MATCHED : position]))
            found = self._next.get(key)
            if found is not None and position >= num_prompt:
                is_right = token_ids[found] == token_ids[position]
                self._num_right = _REMEMBERED * self._num_right + is_right
                self._num_tried = _REMEMBERED * self._num_tried + 1.0
            self._next[key] = position
        self._num_read = max(self._num_read, len(token_ids))

    def draft(self, token_ids: Sequence[int], most: int, ending_ids: Collection[int]) -> list[int]:
        """Up to `most` tokens that may come next, none of which is in `ending_ids`."""
        found = self._next.get(hash(tuple(token_ids[-_NUM_MATCHED:])))
        drafted: list[int] = []
        if found is None:
            return drafted
        for position in range(found, found + most):
            # Behind the known tokens the draft repeats itself.
            behind = position - len(token_ids)
            token_id = token_ids[position] if behind < 0 else drafted[behind]
            if token_id in ending_ids:
                break
            drafted.append(token_id)
        return drafted
