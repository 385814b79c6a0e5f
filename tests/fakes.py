"""Exact fakes: a model whose next token is a hash of the prefix, and its tokenizer.

The hash model keeps a paged KV cache and draws from what it reads back through the block table,
so a wrongly shared, stale or lost block causes a wrong token.
"""

import functools
import hashlib
import weakref
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import numpy as np

from contract.jobs import FinishReason, SamplingParams
from contract.model_cards import TokenizerFiles
from contract.output_formats import ToolFormat
from workers.engine.grammar import Grammars
from workers.engine.interface import Chunk, Drawn, Padding, PromptLogprobs, Row, RowFailed, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepReport
from workers.vllm_engine.placing import HostOutput

# Ids below 256 are the bytes.
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 259
EOS_RATE = 1 / 32
_POISON = -1
# First bytes of characters and how many bytes follow; those with extra rules for the second
# byte (E0, ED, F0, F4) are left out.
_LEADS: tuple[tuple[int, int], ...] = (
    *((byte, 0) for byte in (*range(0x20, 0x7F), 0x0A)),
    *((byte, 1) for byte in range(0xC3, 0xDB)),
    *((byte, 2) for byte in range(0xE1, 0xEA)),
    *((byte, 3) for byte in range(0xF1, 0xF4)),
)
_NUM_FOLLOWING = dict(_LEADS)


class HashModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a HashModel is built. The defaults suit short tests."""

    num_blocks: int = 64
    block_size: int = 16
    max_model_len: int = 512
    eos_rate: float = EOS_RATE  # probability of EOS_ID at each position
    step_s: float = 0.0  # least duration of a step, in the engine process of the tests
    refuses: str | None = None  # the loader raises this error
    load_fifo: str | None = None  # each load waits until somebody opens this FIFO to write
    crash_id: int | None = None  # a sequence with this token crashes the step
    hang_id: int | None = None  # a step with a sequence with this token never ends
    bad_row_id: int | None = None  # a prompt with this token fails alone
    num_state_slots: int = 0  # a state is the hash of all tokens up to its position


class HashModel:
    """A Model without arithmetic. It is exact, so any interleaving must yield the same tokens. As
    in a real KV cache, a slot depends on all tokens up to its own: it has the token and a hash of
    them. `num_steps`, `num_tokens` and `max_step_tokens` count what the engine requested."""

    eos_token_ids = frozenset({EOS_ID})
    shares_blocks = True

    def __init__(self, options: HashModelOptions | None = None) -> None:
        self.options = options or HashModelOptions()
        self.num_state_slots = self.options.num_state_slots
        self._states: dict[int, int] = {}  # by slot
        self.num_blocks = self.options.num_blocks
        self.block_size = self.options.block_size
        self.max_model_len = self.options.max_model_len
        self.num_steps = 0
        self.max_step_tokens = 0
        self.num_padding_tokens = 0
        self.num_tokens = 0
        num_slots = self.num_blocks * self.block_size
        self._slots = np.full(num_slots, _POISON, dtype=np.int64)
        self._prefixes = np.full(num_slots, _POISON, dtype=np.int64)
        self._hashes: weakref.WeakKeyDictionary[Sequence, list[int]] = weakref.WeakKeyDictionary()

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        assert all(0 <= pad.start < pad.start + pad.num_tokens for pad in padding)
        assert all(pad.start + pad.num_tokens <= self.max_model_len for pad in padding)
        self.num_steps += 1
        num_tokens, num_padding = (sum(p.num_tokens for p in parts) for parts in (chunks, padding))
        self.num_tokens += num_tokens
        self.num_padding_tokens += num_padding
        self.max_step_tokens = max(self.max_step_tokens, num_tokens + num_padding)
        self._copy([chunk for chunk in chunks if chunk.copy_from is not None])
        if self.num_state_slots:
            self._start_states(chunks)
        # All are written before any is read, as on a device: an alias overwrites its owner.
        for chunk in chunks:
            self._write(chunk)
        forbidden = {} if masks is None else _forbidden(chunks, masks)
        return [self._row(chunk, forbidden) for chunk in chunks]

    def poison(self, block_ids: Iterable[int]) -> None:
        """Overwrites blocks that must not be read again."""
        ids = list(block_ids)
        for slots in (self._slots, self._prefixes):
            slots.reshape(self.num_blocks, self.block_size)[ids] = _POISON  # a view of the same

    def _copy(self, chunks: Seq[Chunk]) -> None:
        """Reads all sources before it writes, because a source may be another's target."""
        targets = [c.sequence.block_ids[c.start // self.block_size] for c in chunks]
        sources = [c.copy_from for c in chunks if c.copy_from is not None]
        assert len(set(targets)) == len(targets)
        copies = [
            (self._slots[at].copy(), self._prefixes[at].copy())
            for at in map(self._block_slots, sources)
        ]
        for block_id, (slots, prefixes) in zip(targets, copies, strict=True):
            self._slots[self._block_slots(block_id)] = slots
            self._prefixes[self._block_slots(block_id)] = prefixes

    def _block_slots(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _slot_ids(self, sequence: Sequence, start: int, end: int) -> np.ndarray:
        """Slots of positions `start .. end - 1` by the block table; shape (end - start,)."""
        assert end <= len(sequence.block_ids) * self.block_size, "blocks cover the chunk"
        positions = np.arange(start, end)
        block_ids = np.asarray(sequence.block_ids, dtype=np.int64)
        assert block_ids.min() >= 0
        assert block_ids.max() < self.num_blocks
        slots: np.ndarray = (
            block_ids[positions // self.block_size] * self.block_size + positions % self.block_size
        )
        return slots

    def _write(self, chunk: Chunk) -> None:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.num_tokens
        assert chunk.num_known > 0
        assert chunk.samples == (start + chunk.num_known == len(sequence.token_ids))
        assert chunk.samples or not chunk.drafts
        whole = chunk.drafts[-1] if chunk.drafts else sequence
        hashes = np.array(self._prefix_hashes(whole), dtype=np.int64)
        cached_ids = self._slot_ids(sequence, 0, end)[:start]
        cached = self._slots[cached_ids].tolist()
        assert cached == sequence.token_ids[:start], "the cache holds what was computed"
        assert (self._prefixes[cached_ids] == hashes[:start]).all(), "with the same prefix"
        written_ids = self._slot_ids(sequence, start, end)
        self._slots[written_ids] = chunk.token_ids
        self._prefixes[written_ids] = hashes[start:end]
        if self.num_state_slots:
            self._advance_state(chunk, hashes)

    def _start_states(self, chunks: Seq[Chunk]) -> None:
        """Reads all states that sequences start from before it writes any."""
        begun = []
        for state, start in [(chunk.sequence.state, chunk.start) for chunk in chunks]:
            assert state is not None
            if state.source is not None and start == state.source_end:
                begun.append((state.slot, self._states[state.source]))
        self._states |= dict(begun)

    def _advance_state(self, chunk: Chunk, hashes: np.ndarray) -> None:
        state, start, end = chunk.sequence.state, chunk.start, chunk.start + chunk.num_tokens
        assert state is not None
        assert not chunk.drafts
        assert start == 0 or self._states[state.slot] == hashes[start - 1], "of the tokens before"
        for at, slot in state.saves:
            assert start < at <= end
            self._states[slot] = hashes[at - 1]
        self._states[state.slot] = hashes[end - 1]

    def _prefix_hashes(self, sequence: Sequence) -> list[int]:
        """For each position of a sequence: a hash of all tokens up to it."""
        hashes = self._hashes.setdefault(sequence, [])
        for token_id in sequence.token_ids[len(hashes) :]:
            hashes.append(hash((hashes[-1] if hashes else 0, token_id)))
        return hashes

    def _row(self, chunk: Chunk, forbidden: dict[Sequence, np.ndarray]) -> Row:
        sequence = chunk.sequence
        end = chunk.start + chunk.num_known
        if not chunk.drafts:
            return self._answer(chunk, sequence, end, forbidden.get(sequence))
        rows = [
            self._answer(chunk, supposed, end + number, forbidden.get(supposed))
            for number, supposed in enumerate(chunk.sampled)
        ]
        assert all(isinstance(row, Sample | RowFailed) for row in rows)
        return Drawn(tuple(row for row in rows if isinstance(row, Sample | RowFailed)))

    def _answer(
        self, chunk: Chunk, sequence: Sequence, end: int, forbidden: np.ndarray | None
    ) -> Row:
        token_ids = self._slots[self._slot_ids(sequence, 0, end)].tolist()
        if self.options.crash_id in token_ids:
            raise RuntimeError("the device is lost")
        if self.options.bad_row_id in token_ids[: sequence.num_prompt]:
            return RowFailed("the logits hold NaN")
        prompt = _score_prompt(chunk) if sequence.scores_prompt else None
        if not chunk.samples:
            return prompt
        params = sequence.params
        token_id = next_token(
            token_ids,
            params,
            sequence.choice_of_prompt,
            may_end=sequence.num_output >= params.min_tokens,
            eos_rate=self.options.eos_rate,
            forbidden=forbidden,
        )
        top = tuple((i, -float(rank + 1)) for rank, i in enumerate(range(params.logprobs or 0)))
        return Sample(token_id, -0.5, top, prompt)


def _forbidden(chunks: Seq[Chunk], masks: StepMasks) -> dict[Sequence, np.ndarray]:
    sequences = [sequence for chunk in chunks for sequence in chunk.sampled]
    rows, forbidden = masks.of(sequences)
    return {sequences[row]: mask for row, mask in zip(rows, forbidden, strict=True)}


def _score_prompt(chunk: Chunk) -> PromptLogprobs | None:
    sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
    num_top = sequence.params.prompt_logprobs or 0
    expected = expected_prompt_logprobs(sequence.token_ids[: sequence.num_prompt], num_top)
    found = expected[chunk.start : end]
    return PromptLogprobs(chunk.start + 1, tuple(found)) if found else None


def expected_prompt_logprobs(prompt_ids: Seq[int], num_top: int) -> list[Sample]:
    """What any engine must return for a prompt, from its second token on."""
    top = tuple((i, -float(i + 1)) for i in range(num_top))
    logprobs = [-(sum(prompt_ids[:position]) % 97) / 8 for position in range(1, len(prompt_ids))]
    return [Sample(i, p, top) for i, p in zip(prompt_ids[1:], logprobs, strict=True)]


def next_token(
    prefix_ids: Seq[int],
    params: SamplingParams,
    choice: int,
    *,
    may_end: bool,
    eos_rate: float = EOS_RATE,
    forbidden: np.ndarray | None = None,
) -> int:
    """The token after a prefix: bytes of valid UTF-8, and sometimes the end. Depends on seed and
    choice if the temperature is over 0, as real sampling does. If the choice may not end yet, no
    token that would end it is drawn."""
    noise = (params.seed, choice) if params.temperature > 0 else ()
    prefix = array("q", [*prefix_ids, *noise]).tobytes()
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_ID})
    if forbidden is not None:
        return _draw_allowed(prefix, np.flatnonzero(~forbidden).tolist())
    for salt in range(256):
        digest = hashlib.blake2b(prefix, digest_size=16, salt=salt.to_bytes(2, "little")).digest()
        number = int.from_bytes(digest, "little")
        token_id = _draw(prefix_ids, number, eos_rate, params.top_k)
        if may_end or token_id not in stop_ids:
            return token_id
    return min(set(range(VOCAB_SIZE)) - stop_ids)


def _draw_allowed(prefix: bytes, allowed_ids: Seq[int]) -> int:
    """One of the tokens that a grammar allows."""
    digest = hashlib.blake2b(prefix, digest_size=16).digest()
    return allowed_ids[int.from_bytes(digest, "little") % len(allowed_ids)]


def _draw(prefix_ids: Seq[int], number: int, eos_rate: float, top_k: int) -> int:
    """A token from a 128-bit number: one of the first `top_k` letters, if it is from 1 to 26. Else
    unfinished characters are finished first."""
    number, ppm = number // 1_000_000, number % 1_000_000
    if ppm < eos_rate * 1_000_000:
        return EOS_ID
    if 0 < top_k <= 26:
        return ord("a") + number % top_k
    if _num_bytes_missing(prefix_ids) > 0:
        return 0x80 + number % 64
    number, percent = number // 100, number % 100
    num_following = 0 if percent < 80 else 1 + percent % 3
    leads = [byte for byte, following in _LEADS if following == num_following]
    return leads[number % len(leads)]


def _num_bytes_missing(prefix_ids: Seq[int]) -> int:
    """How many bytes the character at the end of the prefix lacks."""
    for num_seen, token_id in enumerate(reversed(prefix_ids[-3:])):
        if token_id in _NUM_FOLLOWING:
            return max(0, _NUM_FOLLOWING[token_id] - num_seen)
        if not 0x80 <= token_id < 0xC0:
            return 0
    return 0


def expected_output(
    prompt_ids: Seq[int],
    params: SamplingParams,
    *,
    choice: int = 0,
    max_model_len: int = 512,
    eos_rate: float = EOS_RATE,
) -> tuple[list[int], FinishReason]:
    """All output tokens of one choice and its finish reason: what any engine must yield."""
    matcher = hash_grammars().matcher(params.grammar) if params.grammar else None
    output_ids: list[int] = []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos and not matcher else {EOS_ID})
    while len(output_ids) < params.max_tokens and len(prompt_ids) + len(output_ids) < max_model_len:
        may_end = matcher is not None or len(output_ids) >= params.min_tokens
        token_ids = [] if matcher is None or params.logprobs is not None else matcher.forced()
        if not token_ids:
            terms: dict[str, Any] = {"may_end": may_end, "eos_rate": eos_rate}
            if matcher is not None:
                [terms["forbidden"]] = hash_grammars().forbidden([matcher])
            token_ids = [next_token([*prompt_ids, *output_ids], params, choice, **terms)]
        output_ids.append(token_ids[0])
        if matcher is not None:
            matcher.consume(token_ids[0])
        if (may_end and token_ids[0] in ends) or (matcher is not None and matcher.is_complete):
            return output_ids, FinishReason.STOP
    return output_ids, FinishReason.LENGTH


class HashHost:
    """A host of requests with the hash model's tokens, which schedules as vLLM does: it computes at
    most `num_step_tokens` in a step, prompts in chunks, and remembers no KV of what has left it."""

    def __init__(
        self,
        num_places: int,
        *,
        num_step_tokens: int = 10_000,
        num_kv_tokens: int = 10_000,
        max_model_len: int = 512,
        eos_rate: float = EOS_RATE,
        num_each: int = 1,
    ) -> None:
        """`num_each`: tokens that a step yields for a sequence, as with drafts."""
        self.num_places = num_places
        self.num_step_tokens = num_step_tokens
        self.num_kv_tokens = num_kv_tokens
        self.max_model_len = max_model_len
        self.started: list[Sequence] = []  # in the order in which they came, some of them again
        self._eos_rate = eos_rate
        self._num_each = num_each
        self._pending: dict[Sequence, int] = {}  # tokens to compute before the next is drawn

    @property
    def requests(self) -> list[Sequence]:
        return list(self._pending)

    def start(self, sequence: Sequence, priority: int) -> None:
        assert len(self._pending) < self.num_places, "one more than there are places"
        assert sequence not in self._pending
        assert sequence.finish_reason is None
        self.started.append(sequence)
        self._pending[sequence] = sequence.num_known

    def abort(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._pending.pop(sequence, None)

    def step(self) -> list[HostOutput]:
        assert self._pending, "a step without requests would never end"
        outputs, num_left = [], self.num_step_tokens
        for sequence, num_pending in list(self._pending.items()):
            num_computed = min(num_pending, num_left)
            num_left -= num_computed
            self._pending[sequence] -= num_computed
            if self._pending[sequence] == 0:
                outputs.append(self._output(sequence))
        return outputs

    def count(self, report: StepReport) -> None:
        report.num_running = len(self._pending)

    def _output(self, sequence: Sequence) -> HostOutput:
        """The next tokens, up to the end as vLLM sees it: without a grammar's."""
        params, token_ids = sequence.params, list(sequence.token_ids)
        matcher = None
        if params.grammar:
            matcher = hash_grammars().matcher(params.grammar, token_ids[sequence.num_prompt :])
        samples: list[Sample] = []
        end = None
        while len(samples) < self._num_each and end is None:
            num_output = len(token_ids) - sequence.num_prompt
            forbidden = None
            if matcher is not None:
                [forbidden] = hash_grammars().forbidden([matcher])
            token_id = next_token(
                token_ids,
                params,
                sequence.choice_of_prompt,
                may_end=num_output >= params.min_tokens,
                eos_rate=self._eos_rate,
                forbidden=forbidden,
            )
            token_ids.append(token_id)
            top = tuple((i, -float(rank + 1)) for rank, i in enumerate(range(params.logprobs or 0)))
            samples.append(Sample(token_id, -0.5, top))
            if matcher is not None:
                matcher.consume(token_id)
            if num_output >= params.min_tokens and token_id in sequence.ending_ids:
                end = "stop"
            elif num_output + 1 == params.max_tokens or len(token_ids) == self.max_model_len:
                end = "length"
            elif matcher is not None and matcher.is_complete:
                break  # vLLM would draw on, from a mask that allows the end alone
        self._pending[sequence] = 1
        if end is not None:
            del self._pending[sequence]
        prompt: tuple[Sample, ...] = ()
        if sequence.scores_prompt:
            num_top = params.prompt_logprobs or 0
            prompt = tuple(expected_prompt_logprobs(token_ids[: sequence.num_prompt], num_top))
        return HostOutput(sequence, samples, prompt, end=end)


class InlineExecutor(Executor):
    """Runs each call at once, so that its time does not depend on threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


# What compiles, and what makes masks.
INLINE = (InlineExecutor(), InlineExecutor())


@functools.cache
def hash_grammars() -> Grammars:
    """Grammars of the hash model's tokenizer."""
    return Grammars(hash_tokenizer().tokenizer_json, VOCAB_SIZE, {EOS_ID}, *INLINE)


def encode_text(text: str) -> tuple[int, ...]:
    """The hash model's token ids of a text: its UTF-8 bytes."""
    return tuple(text.encode())


def output_text(token_ids: Seq[int]) -> str:
    """The text of output tokens: special tokens have none, an incomplete character is U+FFFD."""
    return bytes(i for i in token_ids if i < 256).decode(errors="replace")


_HASH_TEMPLATE = (
    "{% for tool in tools or [] %}tool: {{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}({{ message.reasoning_content }}) {% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@functools.cache
def hash_tokenizer() -> TokenizerFiles:
    """A lossless byte-level tokenizer for `tokenizers`: id = byte, then three specials."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = {"<bos>": BOS_ID, "<eos>": EOS_ID, "<pad>": PAD_ID}
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocab() | specials, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=_HASH_TEMPLATE,
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
        tool_format=ToolFormat(open="<call>", close="</call>"),
    )


def _byte_vocab() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes, each with its byte as its id."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(256 + rank): byte for rank, byte in enumerate(others)}
    return {chr(byte): byte for byte in sorted(printable)} | stand_ins
