"""Constrains a choice's tokens to a grammar, by llguidance. Uses no tensors.

A grammar is llguidance's serialised form (JSON), as gateways make it from a JSON schema, a regular
expression or Lark. A Matcher depends only on the grammar and the tokens consumed. So a resumed
choice, whose logged tokens are consumed again, continues as it would have.

Compilations and masks have threads of their own, in which tenants take turns.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from contract.byte_cache import ByteCache
from contract.errors import ErrorCode
from contract.fair_shares import FairShares
from contract.jobs import GRAMMAR_LIMITS

T = TypeVar("T")


class TenantTurns:
    """At most one call of a tenant runs at a time, so that a tenant with many waits for itself; the
    tenant that has had the fewest is next.

    A call that was cancelled before it began is dropped, and costs its tenant no turn.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = Lock()
        self._shares: FairShares[str] = FairShares()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._served: set[str] = set()  # tenants whose calls run now

    def submit(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._shares.arrive(tenant)
            self._waiting.setdefault(tenant, deque()).append((future, call))
        self._executor.submit(self._run)
        return future

    def _run(self) -> None:
        """Runs calls until none may begin."""
        while (begun := self._begin()) is not None:
            tenant, future, call = begun
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                self._served.discard(tenant)
                self._shares.leave(tenant)

    def _begin(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            while free := [tenant for tenant in self._waiting if tenant not in self._served]:
                tenant = min(free, key=self._shares.served.__getitem__)
                future, call = self._waiting[tenant].popleft()
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
                if future.set_running_or_notify_cancel():
                    self._served.add(tenant)
                    self._shares.charge(tenant, 1.0)
                    return tenant, future, call
                self._shares.leave(tenant)
        return None


_MAX_KEPT_BYTES = 512 * 2**20  # of compiled grammars
# llguidance does not tell how large they are. Measured: 50 bytes for each of a schema, 1,480 where
# each word is a class of Unicode; then up to 6 kB for each mask, as copies share a lexer's states.
_BASE_BYTES, _BYTES_PER_BYTE, _BYTES_PER_MASK = 64 * 1024, 1_536, 8 * 1024
_MASKS_BETWEEN = 64  # two looks at how large a grammar has become
# Then others compile it anew: a lexer with too many states fails for all that share it.
_MAX_MASKS = 8_192
_NUM_THREADS = 2  # for each kind of work, so that a tenant with much of it leaves one to others
# A compilation yields to the engine's step where both want the same core.
_NICENESS = 10
_MISMATCH = "doesn't satisfy the grammar"  # in an error of the library


class GrammarFailed(Exception):
    """A grammar that cannot be compiled, an output that does not match it, or a limit that was
    reached. The message is one sentence without any content."""

    code = ErrorCode.ENGINE_ERROR  # of a job whose output had begun


class LimitReached(GrammarFailed):
    """A grammar that is too complex to go on: a fault of its caller."""

    code = ErrorCode.BAD_PARAMETER


@dataclass(frozen=True, slots=True)
class Mask:
    """The tokens that a choice may not take next, perhaps still being computed. bool, shape
    (num_rows, vocab_size): `row`, then a row after each token of the choice's draft."""

    found: Future[np.ndarray]
    row: int


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar and the states of its lexer, which its matchers share."""

    grammar: str
    state: LLMatcher
    num_masks: int = 0

    @property
    def num_bytes(self) -> int:
        num_bytes = len(self.grammar.encode())
        return _BASE_BYTES + _BYTES_PER_BYTE * num_bytes + _BYTES_PER_MASK * self.num_masks


class Matcher:
    """The position of one choice in its grammar."""

    def __init__(
        self,
        compiled: Compiled,
        tokenizer: LLTokenizer,
        eos_token_ids: Collection[int],
        tenant: str = "",
    ) -> None:
        self.compiled = compiled
        self.state = compiled.state.deep_copy()
        self.tenant = tenant
        self.mask: Mask | None = None  # kept until a token is taken; the state rests meanwhile
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can follow."""
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def is_masking(self) -> bool:
        """Whether its mask is still being computed."""
        return self.mask is not None and not self.mask.found.done()

    def consume(self, token_id: int) -> None:
        """Takes a token that was sampled. Raises GrammarFailed for one that cannot follow."""
        assert not self.is_masking
        self.mask = None
        # In its error state the library allows and accepts the end of the output.
        if self.state.is_error() or not self.state.consume_token(token_id):
            if _MISMATCH in self.state.get_error():
                raise GrammarFailed("a token does not match the grammar")
            raise LimitReached("the grammar is too complex: the output reached one of its limits")

    def num_allowed(self, token_ids: Seq[int]) -> int:
        """The number of leading tokens that may follow, one after the other."""
        return self.state.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """Returns the tokens that must come next by the grammar, without consuming them.

        They are the tokenizer's own tokens of the forced text, except at its end, where a longer
        text may have others; none if only the end can follow. They end before text that is spelled
        like an added token: the tokenizer reads it as that token, which is not text to a grammar.
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


class Grammars:
    """Compiles grammars for one tokenizer and computes the masks of their choices."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Collection[int],
        compiler: Executor | None = None,
        masker: Executor | None = None,
    ) -> None:
        """The executors run what must not delay a step; by default each has threads of its own.
        Raises GrammarFailed for a tokenizer that llguidance cannot read."""
        self.vocab_size = vocab_size
        self.num_mask_words = (vocab_size + 31) // 32
        self._eos_token_ids = frozenset(eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except ValueError as error:
            raise GrammarFailed("the model's tokenizer has no form for grammars") from error
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)
        self._compiled: ByteCache[Compiled] = ByteCache(_MAX_KEPT_BYTES)
        self._lock = threading.Lock()  # of the compiled grammars
        self._compilations = TenantTurns(
            compiler or ThreadPoolExecutor(_NUM_THREADS, "compile", initializer=_give_way)
        )
        self._masks = TenantTurns(masker or ThreadPoolExecutor(_NUM_THREADS, "mask"))
        self._num_at_once = max(1, 4 * (os.cpu_count() or 1) // 5)
        self._mask_threads = LLExecutor(self._num_at_once)

    def start_matchers(
        self, grammar: str, outputs: Seq[Seq[int]], tenant: str = ""
    ) -> Future[list[Matcher]]:
        """Computes the states of several choices beside the engine's steps; see `matcher`."""
        # Cached grammars do not wait for compilations of others.
        turns = self._compilations if self._kept(grammar) is None else self._masks
        return turns.submit(
            tenant, lambda: [self.matcher(grammar, output_ids, tenant) for output_ids in outputs]
        )

    def start_masks(self, drafts: Mapping[Matcher, Seq[int]]) -> None:
        """Starts `forbidden` for each matcher with its draft, beside the forward. A matcher that
        was late for an earlier step already has its mask, and no draft."""
        by_tenant: dict[str, list[Matcher]] = {}
        for matcher, draft in drafts.items():
            if matcher.mask is None:
                by_tenant.setdefault(matcher.tenant, []).append(matcher)
            else:
                assert not draft
        for tenant, matchers in by_tenant.items():
            for matcher in matchers:
                self._note_masks(matcher, 1 + len(drafts[matcher]))
            for first in range(0, len(matchers), self._num_at_once):
                part = matchers[first : first + self._num_at_once]
                own = [drafts[matcher] for matcher in part]
                found = self._masks.submit(tenant, partial(self.forbidden, part, own))
                row = 0
                for matcher, draft in zip(part, own, strict=True):
                    matcher.mask = Mask(found, row)
                    row += 1 + len(draft)

    def matcher(self, grammar: str, output_ids: Seq[int] = (), tenant: str = "") -> Matcher:
        """Returns a new choice's state after `output_ids`. Takes up to a second for a large
        grammar, and releases the interpreter's lock meanwhile. Raises GrammarFailed."""
        compiled = self._kept(grammar)
        if compiled is None:
            state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if state.is_error():
                raise GrammarFailed("the grammar cannot be compiled for this model")
            compiled = Compiled(grammar, state)
            with self._lock:
                self._keep(compiled, tenant)
        matcher = Matcher(compiled, self._tokenizer, self._eos_token_ids, tenant)
        for token_id in output_ids:
            matcher.consume(token_id)
        return matcher

    def _kept(self, grammar: str) -> Compiled | None:
        with self._lock:
            return self._compiled.get(grammar)

    def _keep(self, compiled: Compiled, tenant: str) -> None:
        self._compiled.keep(compiled.grammar, compiled, compiled.num_bytes, tenant)

    def _note_masks(self, matcher: Matcher, num_masks: int) -> None:
        """Counts what masks add to a kept grammar, and forgets one that has had many."""
        compiled = matcher.compiled
        before = compiled.num_masks // _MASKS_BETWEEN
        compiled.num_masks += num_masks
        if compiled.num_masks // _MASKS_BETWEEN == before:
            return
        with self._lock:
            if self._compiled.get(compiled.grammar) is compiled:
                self._compiled.drop(compiled.grammar)
                if compiled.num_masks < _MAX_MASKS:
                    self._keep(compiled, matcher.tenant)

    def forbidden(self, matchers: Seq[Matcher], drafts: Seq[Seq[int]] = ()) -> np.ndarray:
        """Returns which tokens cannot follow: bool, shape (num_rows, vocab_size). Each matcher has
        a row for its state, and one for its state after each token of its draft, which must be
        allowed. Releases the interpreter's lock. A matcher over a limit allows none, and `consume`
        raises."""
        rows: list[tuple[Matcher, int, Seq[int]]] = []
        num_rows = 0
        for matcher, token_ids in zip(matchers, drafts or [()] * len(matchers), strict=True):
            rows.append((matcher, num_rows, token_ids))
            num_rows += 1 + len(token_ids)
        mask = np.zeros((num_rows, self.num_mask_words), dtype=np.int32)
        self._fill(mask, rows)
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
        forbidden: np.ndarray = bits[:, : self.vocab_size] == 0
        return forbidden

    def fill(self, mask: np.ndarray, rows: Seq[tuple[Matcher, int, Seq[int]]]) -> None:
        """Writes which tokens can follow, as `forbidden`, into rows of mask: int32, shape (any,
        num_mask_words), contiguous; token i is bit i % 32 of word i // 32. Each matcher has its
        first row and its draft."""
        for matcher, row, draft in rows:
            self._note_masks(matcher, 1 + len(draft))
            mask[row : row + 1 + len(draft)] = 0
        self._fill(mask, rows)

    def _fill(self, mask: np.ndarray, rows: Seq[tuple[Matcher, int, Seq[int]]]) -> None:
        place = mask.ctypes.data, mask.shape[1] * mask.itemsize, len(mask)
        plain = [(matcher.state, row) for matcher, row, draft in rows if not draft]
        if plain:
            self._mask_threads.unsafe_compute_mask_ptr(plain, *place)
        drafted = [(matcher.state, row, list(draft)) for matcher, row, draft in rows if draft]
        if drafted:
            self._mask_threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)


def _give_way() -> None:
    """Lowers the priority of the thread that calls it, where threads have one of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
