"""The prompt's part of a response: its text (echo) and its log probabilities in both formats."""

from functools import cached_property
from typing import Any

from contract.events import Prompt, TokenLogprob
from contract.jobs import Job
from gateway.follow.logprobs import completion_logprobs, listed_logprob
from gateway.models.text_stream import TextStream
from gateway.models.tokens import ModelTokenizer


class PromptPart:
    """One prompt of a job, as responses show it. Without a tokenizer it shows nothing."""

    def __init__(
        self, job: Job, prompt_ids: tuple[int, ...], tokenizer: ModelTokenizer | None
    ) -> None:
        self._job = job
        self.prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._items: list[TokenLogprob] = []  # from the second token on; the first has none

    def reset(self) -> None:
        self._items.clear()

    def add(self, event: Prompt) -> None:
        self._items += event.logprobs

    @cached_property
    def text(self) -> str:
        """The prompt's text, decoded from its ids; '' without echo."""
        if not self._job.echo or self._tokenizer is None:
            return ""
        stream = self._tokenizer.text_stream()
        pieces = [stream.push(token_id)[1] for token_id in self.prompt_ids]
        return "".join(pieces) + stream.end()

    def output_stream(self, tokenizer: ModelTokenizer) -> TextStream:
        """The text of a choice, which follows the echo."""
        return tokenizer.text_stream(self.prompt_ids, len(self.text))

    def echoed_logprobs(self) -> dict[str, list[Any]] | None:
        """Log probabilities of an echo, in the format of completions; null for the first token."""
        num_top = self._job.params.logprobs
        if not self._job.echo or num_top is None or self._tokenizer is None:
            return None
        items = [
            TokenLogprob(item.token_id, item.logprob, item.top[:num_top]) for item in self._items
        ]
        first = TokenLogprob(self.prompt_ids[0], 0.0)
        shape = completion_logprobs(self._tokenizer, [first, *items], self._tokenizer.text_stream())
        shape["token_logprobs"][0] = shape["top_logprobs"][0] = None
        return shape

    def listed_logprobs(self) -> dict[str, Any]:
        """`prompt_logprobs`, if requested: null, then vLLM's entries by token id."""
        num_top = self._job.prompt_logprobs
        if num_top is None:
            return {}
        if self._tokenizer is None:
            return {"prompt_logprobs": None}
        listed = [listed_logprob(self._tokenizer, item, num_top) for item in self._items]
        return {"prompt_logprobs": [None, *listed]}
