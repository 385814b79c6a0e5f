"""Decodes one choice's token ids incrementally and finds stop strings; chooses the parser that
reads the text, and the special tokens that it sees.

The text released after k tokens depends only on those tokens, not on step boundaries, so a resumed
job rebuilds the same state by replaying its log."""

import os.path
from collections.abc import Collection, Sequence

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from contract.jobs import Endpoint, Job
from contract.model_cards import TokenizerFiles
from contract.output_formats import GEMMA_QUOTE, ReasoningFormat, ToolFormat
from workers.output.harmony import MARKS
from workers.output.parser import OutputParser

_END_TOKENS = 64  # of a prompt, which may begin the reasoning
_PYTHON_TAG = "<|python_tag|>"


class OutputFormats:
    """A model's formats, with its tokenizer."""

    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reasoning, self._tool_format = files.reasoning, files.tool_format
        added = tokenizer.get_added_tokens_decoder().items()
        special = {token_id: token.content for token_id, token in added if token.special}
        self._hidden = {
            calls: frozenset(set(special) - _marks(special, files, calls))
            for calls in (False, True)
        }

    def parser(self, job: Job, prompt_ids: Sequence[int]) -> OutputParser | None:
        """Returns a parser for one choice of a job; None if its output is plain text."""
        tool_format = self._tool_format if job.tools else None
        is_chat = job.endpoint is not Endpoint.COMPLETIONS
        if not is_chat or (self._reasoning is None and tool_format is None):
            return None
        prompt_end = self._tokenizer.decode(prompt_ids[-_END_TOKENS:], skip_special_tokens=False)
        return OutputParser(tool_format, self._reasoning, prompt_end, job.tools)

    def hidden_ids(self, job: Job) -> frozenset[int]:
        """The special tokens that are not marks of the formats: they have no text."""
        return self._hidden[bool(job.tools)]


def _marks(special: dict[int, str], files: TokenizerFiles, calls: bool) -> set[int]:
    formats: list[ReasoningFormat | ToolFormat | None] = [files.reasoning]
    if calls:
        formats.append(files.tool_format)
    known = [each for each in formats if each is not None]
    literals = [
        value for each in known for value in msgspec.structs.astuple(each) if isinstance(value, str)
    ]
    if files.reasoning is not None and files.reasoning.is_harmony:
        literals += MARKS
    if calls and files.tool_format is not None:
        literals += [_PYTHON_TAG] if files.tool_format.is_bare else []
        literals += [GEMMA_QUOTE] if files.tool_format.syntax == "gemma" else []
    return {i for i, content in special.items() if any(content in each for each in literals)}


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
