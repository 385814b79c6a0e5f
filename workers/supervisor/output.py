"""How the outputs of a worker's model are read: which parser, and which special tokens it sees."""

from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

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
