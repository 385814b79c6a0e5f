"""A model's tokenizer and chat template, as workers published them.

`tokenizers` takes about 140 bytes for each character while it encodes. So a long text is read in
pieces. Tokens far enough from the edges of a piece are the same as in the whole text, because
words, and what merges with them, are shorter than that distance.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from contract.model_cards import TokenizerFiles
from contract.output_formats import GEMMA_QUOTE
from contract.token_texts import TokenTexts
from gateway.child import Refused
from gateway.child_process import ChildFailed, ChildLimits, ChildPool, ChildUnreadable
from gateway.http.errors import ModelUnreadable, TemplateFailed, TemplateRefused
from gateway.turns import Turns, turn

PIECE_CHARS = 65_536
_EDGE_CHARS = 256  # at a cut, where the tokens may be others than in the whole

log = logging.getLogger("batchway.gateway")

_END_TOKENS = 64  # of a prompt, which may begin the reasoning
_SMALL_CHARS = 4_096  # up to this length, tokenising takes less time than starting a thread
_TURNS = Turns()  # of work that belongs to no gateway


T = TypeVar("T")
Given = TypeVar("Given", str, tuple[str, str])


async def tokenised(work: Callable[[], T], num_chars: int) -> T:
    """Returns the result of `work`, which tokenises `num_chars` characters: if they are many, in a
    thread and at the caller's turn. Raises Busy."""
    if num_chars <= _SMALL_CHARS:
        return work()
    async with turn(_TURNS):
        return await asyncio.to_thread(work)


class Over(msgspec.Struct, frozen=True):
    """A text has too many tokens: `num_tokens` or, unless `is_exact`, even more."""

    num_tokens: int
    is_exact: bool = True

    def __str__(self) -> str:
        return f"{self.num_tokens}" if self.is_exact else f"over {self.num_tokens}"


def least_tokens(tokenizer: Any, text: str, most: int) -> int:
    """Returns a lower bound of the text's number of tokens. Stops counting above `most`."""
    num_tokens = 0
    for start, piece in _pieces(text):
        # Not `encode_batch_fast`, which gives no places in the text.
        [found] = tokenizer.encode_batch([piece], add_special_tokens=False)
        num_tokens += _inner(found, len(piece), start > 0, start + len(piece) < len(text))
        if num_tokens > most:
            break
    return num_tokens


def about_tokens(tokenizer: Any, text: str) -> int:
    """The text's number of tokens, except for a few at the cuts and special ones."""
    encodings = (
        tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]
        for _, piece in _pieces(text)
    )
    return sum(len(found.ids) for found in encodings)


def part_with(
    tokenizer: Any, text: str, num_tokens: int, *, of_end: bool = False
) -> tuple[str, Any]:
    """Returns a beginning or an end of the text, and its encoding without special tokens. At least
    `num_tokens` of these are the same as in the whole text. A shorter text is returned whole."""
    num_chars = PIECE_CHARS
    while num_chars < len(text):
        part = text[-num_chars:] if of_end else text[:num_chars]
        [found] = tokenizer.encode_batch([part], add_special_tokens=False)
        if _inner(found, num_chars, of_end, not of_end) >= num_tokens:
            return part, found
        num_chars *= 2
    return text, tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    for start in range(0, len(text), PIECE_CHARS):
        yield start, text[start : start + PIECE_CHARS]


def _inner(found: Any, num_chars: int, cut_before: bool, cut_behind: bool) -> int:
    """Counts the tokens of a piece that are far enough from where it was cut."""
    first = _EDGE_CHARS if cut_before else 0
    last = num_chars - _EDGE_CHARS if cut_behind else num_chars
    return sum(first <= start and end <= last for start, end in found.offsets)


class TemplateProcess:
    """One model's chat templates, in processes of their own."""

    def __init__(
        self,
        model: str,
        source: str,
        special_tokens: Mapping[str, str],
        limits: ChildLimits | None = None,
        *,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source`: the template of chats with tools, if they have another one."""
        self._model = model
        self._sources = source + (tool_source or "")
        start = {
            "source": source,
            "tool_source": tool_source,
            "special_tokens": dict(special_tokens),
        }
        self._processes = ChildPool("gateway.models.chat_template", start, limits or ChildLimits())

    @property
    def pid(self) -> int | None:
        """The id of the process that answers next; None if there is none."""
        return self._processes.pid

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        is_answered: bool = True,
        continues: bool = False,
        source: str | None = None,
    ) -> str:
        """The prompt. `variables`: others that the template reads; `is_answered`, `continues`: as
        of ChatTemplate; `source`: a template in the place of the model's.

        Raises TemplateRefused, TemplateFailed, Busy, ModelUnreadable.
        """
        request = {"messages": messages, "tools": tools, "variables": variables, "source": source}
        return await self._ask({**request, "is_answered": is_answered, "continues": continues})

    def reads_documents(self, source: str | None) -> bool:
        return "documents" in (self._sources if source is None else source)

    async def render_pairs(self, instruction: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """The prompt of each query and document. Raises as `render`."""
        rendered = await self._ask({"instruction": instruction, "pairs": pairs})
        prompts: list[str] = json.loads(rendered)
        return prompts

    async def _ask(self, request: object) -> str:
        try:
            return await self._processes.ask(request)
        except Refused as refusal:
            raise TemplateRefused(str(refusal)) from None
        except ChildUnreadable:
            log.error("chat template refused: jinja2 cannot read it model=%s", self._model)
            raise ModelUnreadable(self._model, "chat template") from None
        except ChildFailed as failure:
            log.warning("chat template failed: %s model=%s", failure, self._model)
            raise TemplateFailed(f"the model's chat template failed: {failure}") from failure

    async def aclose(self) -> None:
        """Ends the processes, at once or after their current requests."""
        await self._processes.aclose()


class Cut(msgspec.Struct, frozen=True):
    """The most tokens of a prompt, with special ones, and whether a longer one keeps its end."""

    max_tokens: int
    keeps_end: bool


class NoRoom(Exception):
    """Special tokens and the text that is kept leave no room for anything else."""


class TooLong(Exception):
    """The text or pair of this number has too many tokens."""

    def __init__(self, number: int, over: Over) -> None:
        super().__init__(number)
        self.number = number
        self.over = over


class ModelTokenizer(TokenTexts):
    """One model's tokenizer. All but `template` may be used from several threads.

    Raises ValueError if `tokenizers` cannot read the files.
    """

    def __init__(self, model: str, files: TokenizerFiles) -> None:
        import tokenizers  # here, for a faster start: most functions only read jobs

        super().__init__(files.tokenizer_json, tokenizers)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # None if the model has none.
        self.template: TemplateProcess | None = None
        if files.chat_template is not None:
            self.template = TemplateProcess(
                model, files.chat_template, files.special_tokens, tool_source=files.tool_template
            )
        # The files without the tokenizer and the templates, which are large.
        self.files = msgspec.structs.replace(
            files, tokenizer_json="", chat_template=None, tool_template=None
        )
        self._bos_id = self._tokenizer.token_to_id(files.special_tokens.get("bos_token", ""))

    async def aclose(self) -> None:
        """Ends the chat template's process, if there is one."""
        if self.template is not None:
            await self.template.aclose()

    def encode_each(
        self, texts: Sequence[str], most: int | None, *, adds_special_tokens: bool = True
    ) -> Iterator[list[int] | Over]:
        """Yields the token ids of each text, or an Over for one with more than `most`. Rendered
        chats contain their special tokens."""
        return self._each(texts, most, adds_special_tokens, lambda found: found.ids)

    def encode_prompts(
        self,
        given: Sequence[tuple[str, str | tuple[int, ...]]],
        most: int,
        cut: Cut | None,
        *,
        adds: bool = True,
    ) -> Iterator[tuple[list[int], int]]:
        """Yields the token ids of each prompt, and how many were cut off. `given`: texts, each
        after one that is not cut, or token ids; `most`: of tokens, if they are not to be cut;
        `adds`: special tokens, not to rendered chats, which have them. Raises TooLong, NoRoom."""
        limit = most if cut is None else cut.max_tokens
        texts = [kept + each for kept, each in given if isinstance(each, str)]
        encoded = self.encode_each(texts, limit, adds_special_tokens=adds)
        for number, (kept, each) in enumerate(given):
            whole: list[int] | Over
            if isinstance(each, str):
                whole = next(encoded)
            else:
                whole = list(each) if len(each) <= limit else Over(len(each))
            if not isinstance(whole, Over):
                yield whole, 0
                continue
            if cut is None:
                raise TooLong(number, whole)
            num_tokens = whole.num_tokens
            if not isinstance(each, str):
                ids = self.cut_ids(each, cut)
            else:
                ids = self.cut_text(each, cut, kept) if adds else self.cut_chat(each, cut)
                if not whole.is_exact:
                    num_tokens = self.count(kept + each, adds_special_tokens=adds)
            yield ids, num_tokens - len(ids)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], most: int | None = None
    ) -> Iterator[tuple[list[int], int] | Over]:
        """The same for pairs, with special tokens; and the number of ids of each first text."""
        return self._each(pairs, most, True, lambda found: (found.ids, found.type_ids.count(0)))

    def _each(
        self, given: Sequence[Given], most: int | None, adds: bool, taken: Callable[[Any], T]
    ) -> Iterator[T | Over]:
        for part in _slices(given):
            if most is not None and (num_tokens := self._least_tokens(part[0], most)) > most:
                yield Over(num_tokens, is_exact=False)
                continue
            yield from [
                taken(found) if most is None or len(found) <= most else Over(len(found))
                for found in self._encode(part, adds)
            ]

    def _least_tokens(self, given: str | tuple[str, str], most: int) -> int:
        """A lower bound of the number of tokens of a long text or pair; 0 for short ones."""
        texts = (given,) if isinstance(given, str) else given
        if sum(map(len, texts)) <= PIECE_CHARS:
            return 0
        return sum(least_tokens(self._tokenizer, text, most) for text in texts)

    def count(self, text: str, most: int = 0, *, adds_special_tokens: bool = False) -> int:
        """The number of tokens of a text; approximate if a long text has more than `most`."""
        if self._least_tokens(text, most) > most:
            num_special: int = self._tokenizer.num_special_tokens_to_add(False)
            return about_tokens(self._tokenizer, text) + num_special * adds_special_tokens
        return len(self._encode([text], adds_special_tokens)[0])

    def cut_ids(self, token_ids: Sequence[int], cut: Cut) -> list[int]:
        """Cuts a prompt given as tokens. If its end is kept, so is the token with which all prompts
        begin."""
        ids = list(token_ids)
        if len(ids) <= cut.max_tokens or not cut.keeps_end:
            return ids[: cut.max_tokens]
        begin = ids[: int(ids[0] == self._bos_id)]
        return begin[: cut.max_tokens] + ids[len(ids) - cut.max_tokens + len(begin) :]

    def cut_chat(self, text: str, cut: Cut) -> list[int]:
        """Cuts a rendered chat that has more tokens than allowed."""
        most = cut.max_tokens
        _, begin = part_with(self._tokenizer, text, most)
        _, end = part_with(self._tokenizer, text, most, of_end=True)
        return self.cut_ids(begin.ids[:most] + end.ids[-most:], cut)

    def cut_text(self, text: str, cut: Cut, kept: str = "") -> list[int]:
        """Returns the token ids of `kept` and `text`, which is cut. Raises NoRoom."""
        room = cut.max_tokens - self._tokenizer.num_special_tokens_to_add(False)
        return self._framed(self._shortened(kept + text, room, kept, cut.keeps_end))[0]

    def cut_pair(self, pair: tuple[str, str], cut: Cut, kept: str = "") -> tuple[list[int], int]:
        """Cuts a pair, most from its longer text, as in transformers. Returns the token ids, and
        how many belong to the first text. Raises NoRoom."""
        texts = kept + pair[0], pair[1]
        room = cut.max_tokens - self._tokenizer.num_special_tokens_to_add(True)
        first, second = (self.count(text, room) for text in texts)
        if first + second > room:
            shorter = min(first, second, room // 2)
            first, second = sorted((shorter, room - shorter), reverse=first > second)
        return self._framed(
            self._shortened(texts[0], first, kept, cut.keeps_end),
            self._shortened(texts[1], second, "", cut.keeps_end),
        )

    def _shortened(self, text: str, room: int, kept: str, keeps_end: bool) -> list[int]:
        """At most `room` token ids of a text that begins with `kept`. Raises NoRoom."""
        # Not `Encoding.truncate`, which keeps what it cuts off: `merge` multiplies that.
        ids: list[int] = part_with(self._tokenizer, text, room + 1)[1].ids
        if len(ids) <= room:
            return ids
        num_kept = len(self._encode([kept], False)[0]) if kept else 0
        if room <= num_kept:
            raise NoRoom
        if not keeps_end:
            return ids[:room]
        end: list[int] = part_with(self._tokenizer, text, room, of_end=True)[1].ids
        return ids[:num_kept] + end[num_kept - room :]

    def _framed(self, *texts: list[int]) -> tuple[list[int], int]:
        """Returns the token ids of a text or a pair with the special ones around them, and how many
        of them belong to the first text."""
        ids, num_first = list[int](), 0
        for number, token_id, type_id in self._frames[len(texts)]:
            part = [token_id] if number is None else texts[number]
            ids += part
            num_first += len(part) if type_id == 0 else 0
        return ids, num_first

    @cached_property
    def _frames(self) -> Mapping[int, Sequence[tuple[int | None, int, int]]]:
        """The special tokens around one text and around two, and the texts' numbers, with types."""
        frames = {}
        for number, found in enumerate(
            [*self._encode(["a0."], True), *self._encode([("a0.", "a0.")], True)], 1
        ):
            each = zip(found.sequence_ids, found.ids, found.type_ids, strict=True)
            one_each = {
                (place if text is None else -text - 1): (text, token_id, type_id)
                for place, (text, token_id, type_id) in enumerate(each)
            }
            frames[number] = list(one_each.values())
        return frames

    def shorten(self, text: str, max_tokens: int, *, keeps_end: bool = False) -> str:
        """Returns the part of a text with at most `max_tokens` tokens, without special ones."""
        while True:
            text, found = part_with(self._tokenizer, text, max_tokens + 1, of_end=keeps_end)
            if len(found.ids) <= max_tokens:
                return text
            first, last = found.offsets[-max_tokens], found.offsets[max_tokens - 1]
            shorter = text[first[0] :] if keeps_end else text[: last[1]]
            # A character of several tokens may be at the seam.
            text = shorter if len(shorter) < len(text) else text[1:] if keeps_end else text[:-1]

    def end_of(self, token_ids: Sequence[int]) -> str:
        """The end of a prompt's text, with its special tokens."""
        return self.decode(token_ids[-_END_TOKENS:])

    @cached_property
    def marks(self) -> dict[str, Any]:
        """The added tokens that grammars need: a Marks without its ends."""
        formats = [self.files.reasoning, self.files.tool_format]
        fields = [msgspec.structs.astuple(each) for each in formats if each is not None]
        text = "\0".join(
            [GEMMA_QUOTE, *(text for each in fields for text in each if isinstance(text, str))]
        )
        return {
            "ids": {name: i for i, name in self._added.items() if name.strip() and name in text},
            "added": _ranges(self._added),
        }

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, with that of special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary has them."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _encode(self, given: Sequence[Given], adds_special_tokens: bool) -> Any:
        # `encode` keeps the GIL: in a thread, too, a long text would stop the event loop.
        return self._tokenizer.encode_batch_fast(given, add_special_tokens=adds_special_tokens)


def _slices(given: Sequence[Given]) -> Iterator[list[Given]]:
    """Groups texts or pairs that are short together; a long one is alone."""
    part, num_chars = list[Given](), 0
    for each in given:
        size = len(each) if isinstance(each, str) else sum(map(len, each))
        if part and num_chars + size > PIECE_CHARS:
            yield part
            part, num_chars = [], 0
        part.append(each)
        num_chars += size
    if part:
        yield part


def _ranges(token_ids: Iterable[int]) -> list[list[int]]:
    """Ranges of ids: the first and the last of each."""
    found: list[list[int]] = []
    for token_id in sorted(token_ids):
        if found and found[-1][1] == token_id - 1:
            found[-1][1] = token_id
        else:
            found.append([token_id, token_id])
    return found
