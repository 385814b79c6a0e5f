"""Constrains a choice's tokens to a grammar, by llguidance. Uses no tensors.

A grammar is llguidance's serialised form (JSON), as gateways make it from a JSON schema, a regular
expression or Lark. A Matcher depends on the grammar and the tokens consumed alone, so a resumed
choice, whose logged tokens are consumed again, goes on as it would have.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
from cachetools import LRUCache
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from contract.jobs import GRAMMAR_LIMITS
from workers.engine.request import ErrorCode

_NUM_KEPT = 24  # compiled grammars, each of up to about 70 MB
_MISMATCH = "doesn't satisfy the grammar"  # in an error of the library


class GrammarFailed(Exception):
    """A grammar that cannot be compiled, an output that does not match it, or a limit that was
    reached. The message is one sentence without any content."""

    code = ErrorCode.ENGINE_ERROR  # of a job whose output had begun


class LimitReached(GrammarFailed):
    """A grammar that is too complex to go on: a fault of its caller."""

    code = ErrorCode.BAD_PARAMETER


class Matcher:
    """Where one choice stands in its grammar."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, eos_token_ids: Collection[int]
    ) -> None:
        self.state = matcher
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can follow."""
        return self.state.is_stopped() and not self.state.is_error()

    def consume(self, token_id: int) -> None:
        """Takes a token that was sampled. Raises GrammarFailed for one that cannot follow."""
        # In its error state the library allows the end of the output, and takes it.
        if self.state.is_error() or not self.state.consume_token(token_id):
            if _MISMATCH in self.state.get_error():
                raise GrammarFailed("a token does not match the grammar")
            raise LimitReached("the grammar is too complex: the output reached one of its limits")

    def num_allowed(self, token_ids: Seq[int]) -> int:
        """How many of the tokens may follow, one after the other."""
        return self.state.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """The next tokens as far as the grammar allows no others, not yet consumed.

        They are the tokenizer's own tokens of the forced text, up to where a longer text may have
        others; none where only the end can follow. The tokenizer reads text that is spelled like an
        added token as that token, which is no text to a grammar: there they end.
        """
        text = self.state.compute_ff_bytes()
        if not text:
            return []
        token_ids, rest = self._tokenizer.tokenize_partial(text)
        if rest:
            whole_ids = self._tokenizer.tokenize_bytes(text)
            end = self.state.deep_copy()
            if end.consume_tokens(whole_ids) and end.is_stopped():
                return whole_ids
        forced = token_ids[: self.state.validate_tokens(token_ids)]
        ends = [i for i, token_id in enumerate(forced) if token_id in self._eos_token_ids]
        return forced[: min(ends, default=None)]


class StepMasks:
    """The tokens that the constrained rows of one step may not take."""

    def __init__(self, sequences: Seq[object], forbidden: Future[np.ndarray]) -> None:
        self._row_of = {sequence: row for row, sequence in enumerate(sequences)}
        self._forbidden = forbidden

    def constrains(self, sequence: object) -> bool:
        """Whether there is a mask for it. Does not wait."""
        return sequence in self._row_of

    def of(self, sequences: Seq[object]) -> tuple[list[int], np.ndarray]:
        """Waits for the masks. Which of `sequences` are constrained, as indices, and the tokens
        that each of those may not take: bool, shape (number of indices, vocab_size)."""
        found = [(i, self._row_of[s]) for i, s in enumerate(sequences) if s in self._row_of]
        rows = [row for _, row in found]
        return [index for index, _ in found], self._forbidden.result()[rows]


class Grammars:
    """Compiles grammars for one tokenizer and computes the masks of their choices."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Collection[int],
        executor: Executor | None = None,
    ) -> None:
        """`executor` runs what must not delay a step; by default two threads: one that compiles
        and one for masks may run at a time. Raises GrammarFailed for a tokenizer that llguidance
        cannot read."""
        self.vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except ValueError as error:
            raise GrammarFailed("the model's tokenizer has no form for grammars") from error
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._compiled: LRUCache[str, LLMatcher] = LRUCache(_NUM_KEPT)
        self._executor = executor or ThreadPoolExecutor(2, "grammar")
        self._mask_threads = LLExecutor()

    def start_matchers(self, grammar: str, outputs: Seq[Seq[int]]) -> Future[list[Matcher]]:
        """The states of several choices, computed beside the engine's steps; see `matcher`."""
        return self._executor.submit(
            lambda: [self.matcher(grammar, output_ids) for output_ids in outputs]
        )

    def start_masks(self, matchers: Seq[Matcher], drafts: Seq[Seq[int]] = ()) -> Future[np.ndarray]:
        """`forbidden`, computed beside the forward."""
        return self._executor.submit(self.forbidden, matchers, drafts)

    def matcher(self, grammar: str, output_ids: Seq[int] = ()) -> Matcher:
        """A new choice's state after `output_ids`. Takes up to a second for a large grammar, and
        releases the interpreter's lock meanwhile. Raises GrammarFailed."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if compiled.is_error():
                raise GrammarFailed("the grammar cannot be compiled for this model")
            self._compiled[grammar] = compiled
        matcher = Matcher(compiled.deep_copy(), self._tokenizer, self._eos_token_ids)
        for token_id in output_ids:
            matcher.consume(token_id)
        return matcher

    def forbidden(self, matchers: Seq[Matcher], drafts: Seq[Seq[int]] = ()) -> np.ndarray:
        """Which tokens cannot follow: bool, shape (num_rows, vocab_size). Each matcher has a row
        for its state, and one for its state after each token of its draft, which must be allowed.
        Releases the interpreter's lock. A matcher that reached a limit allows none, and `consume`
        raises."""
        num_words = (self._tokenizer.vocab_size + 31) // 32
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        num_rows = 0
        for matcher, token_ids in zip(matchers, drafts or [()] * len(matchers), strict=True):
            if token_ids:
                drafted.append((matcher.state, num_rows, list(token_ids)))
            else:
                plain.append((matcher.state, num_rows))
            num_rows += 1 + len(token_ids)
        mask = np.zeros((num_rows, num_words), dtype=np.int32)
        place = mask.ctypes.data, num_words * 4, num_rows
        if plain:
            self._mask_threads.unsafe_compute_mask_ptr(plain, *place)
        if drafted:
            self._mask_threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
        forbidden = np.ones((num_rows, self.vocab_size), dtype=bool)
        width = min(self.vocab_size, self._tokenizer.vocab_size)
        np.equal(bits[:, :width], 0, out=forbidden[:, :width])
        return forbidden
