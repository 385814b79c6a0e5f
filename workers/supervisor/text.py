"""Decodes one choice's token ids incrementally and finds stop strings.

The text released after k tokens depends only on those tokens, not on step boundaries, so a resumed
job rebuilds the same state by replaying its log.
"""

import os.path
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A token such as "▁world" decodes with its leading space only after other tokens.
_NUM_CONTEXT_IDS = 6
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class ChoiceText:
    """The text of one choice. Holds back incomplete characters and possible starts of stop
    strings. Tokens of `hidden_ids` have no text; by default, all special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...],
        min_tokens: int,
        hidden_ids: Collection[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = hidden_ids is None
        self._hidden_ids = hidden_ids or ()
        context = [i for i in prompt_ids[-_NUM_CONTEXT_IDS:] if i not in self._hidden_ids]
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skips_special)
        # The prompt's end, if a character may be incomplete there: then the first piece repeats it.
        text = tokenizer.decode(context, skip_special_tokens=self._skips_special)
        self._prompt_end = text if text.endswith(_INCOMPLETE) else ""
        # Ids that do not form a whole character yet.
        self._undecoded: list[int] = context if self._prompt_end else []
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded, but possibly the start of a stop string
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Returns the text that this token releases. Sets `is_stopped` after a stop string."""
        assert not self.is_stopped
        self._num_tokens += 1
        if token_id in self._hidden_ids:
            return ""
        self._undecoded.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            return ""
        self._undecoded.clear()
        piece = self._after_prompt(piece)
        if self._num_tokens <= self._min_tokens or not self._stop:
            return piece
        return self._release(self._held + piece)

    def flush(self) -> str:
        """Returns the text held back, when a choice ends without a stop string."""
        rest = self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skips_special)
        text, self._held = self._held + self._after_prompt(rest), ""
        self._undecoded.clear()
        return text

    def _after_prompt(self, text: str) -> str:
        """The first decoded text, without the prompt's."""
        text = text[len(os.path.commonprefix([text, self._prompt_end])) :]
        self._prompt_end = ""
        return text

    def _release(self, text: str) -> str:
        """Returns `text` up to its first stop string, or up to what may begin one."""
        starts = [start for stop in self._stop if (start := text.find(stop)) >= 0]
        if starts:
            self.is_stopped, self._held = True, ""
            return text[: min(starts)]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
