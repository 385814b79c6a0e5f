"""Turns a call for vectors into a prefill-only job: applies the model's instructions, tokenises
texts and pairs, checks them against the model.
"""

from collections.abc import Mapping, Sequence

import msgspec

from contract.function_types import Submission
from contract.jobs import Job, Pooling
from contract.model_cards import ModelCard
from gateway.http.errors import (
    CONTEXT_EXCEEDED,
    ApiError,
    TemplateRefused,
    bad_request,
    invalid_value,
)
from gateway.models.tokens import (
    PIECE_CHARS,
    Cut,
    ModelTokenizer,
    NoRoom,
    Over,
    TooLong,
    tokenised,
)
from gateway.prepare.generation import Prompts, check_ids, with_prompts
from gateway.prepare.schemas import no_room
from gateway.prepare.vector_bodies import (
    EmbeddingsBody,
    InputBody,
    RerankBody,
    ScoreBody,
    VectorBody,
)

Pairs = Sequence[tuple[str, str]]
_MAX_ROUNDS = 4  # of shortening texts, whose tokens change with what stands beside them

# Limit of a call's pairs or rendered texts, in which the query is repeated for each document.
MAX_PAIR_CHARS = 4 * 1024 * 1024
_BYTES_PER_NUMBER = 4  # float32
_VECTOR_OVERHEAD_BYTES = 32  # of an event's part


class _Asked(msgspec.Struct, frozen=True):
    """A job's prompts, their parameter names in errors, and what is computed from them."""

    names: Sequence[str]
    prompts: Prompts
    num_cut: int  # tokens
    pooling: Pooling = Pooling()


async def prepare_vectors(
    card: ModelCard, tokenizer: ModelTokenizer, body: VectorBody, job: Job, submission: Submission
) -> tuple[Job, Submission]:
    """Returns the job with its prompts, and its submission. Raises ApiError."""
    cut, shown = body.cut_texts(card), body
    texts = _Texts(tokenizer, card, cut)
    body, num_cut = await texts.with_short_documents(body)
    if isinstance(body, InputBody) and not body.pairs:
        asked = await texts.of_inputs(body)
    elif texts.can.kind == "embedding":
        assert not isinstance(body, InputBody), "no embedding of a pair can be asked for"
        asked = await texts.of_queries_and_documents(body)
    else:
        asked = await texts.of_pairs(body)
    for name, prompt_ids in zip(asked.names, asked.prompts, strict=True):
        if not prompt_ids:
            raise invalid_value(name, f"{name} has no tokens")
        check_ids(name, prompt_ids, card)
    pooling = asked.pooling
    if isinstance(shown, RerankBody):
        documents = shown.documents if shown.return_documents else ()
        top_n = shown.top_n or None
        pooling = msgspec.structs.replace(pooling, documents=documents, top_n=top_n)
    may_cut = cut is not None or body is not shown
    num_cut_tokens = num_cut + asked.num_cut if may_cut else None
    job = with_prompts(job, card, asked.prompts, pooling=pooling, num_cut_tokens=num_cut_tokens)
    num_bytes = vector_bytes(len(asked.prompts), pooling.dimensions or texts.can.num_outputs)
    return job, msgspec.structs.replace(submission, vector_bytes=num_bytes)


def vector_bytes(num_prompts: int, num_numbers: int) -> int:
    """The bytes that the output of a prefill-only job may take."""
    return num_prompts * (num_numbers * _BYTES_PER_NUMBER + _VECTOR_OVERHEAD_BYTES)


class _Texts:
    """Makes prompts of the texts of one call. `cut`: how long ones are cut; None: they are refused.
    Its methods raise ApiError."""

    def __init__(self, tokenizer: ModelTokenizer, card: ModelCard, cut: Cut | None) -> None:
        assert card.pooling is not None, "the model answers such calls"
        self.can = card.pooling
        self._tokenizer = tokenizer
        self._card = card
        self._cut = cut

    async def with_short_documents(self, body: VectorBody) -> tuple[VectorBody, int]:
        """Returns the body with documents cut to `max_tokens_per_doc`, and how many tokens that
        cuts off; the same body if there is no limit."""
        if isinstance(body, InputBody) or not body.max_tokens_per_doc:
            return body, 0
        most, tokenizer = body.max_tokens_per_doc, self._tokenizer
        name = "documents" if isinstance(body, RerankBody) else "text_2"
        texts: tuple[str, ...] = getattr(body, name)

        def shortened() -> tuple[list[str], int]:
            found = [tokenizer.shorten(text, most) for text in texts]
            before, after = (sum(map(tokenizer.count, each)) for each in (texts, found))
            return found, before - after

        found, num_cut = await tokenised(shortened, sum(map(len, texts)))
        return body.model_copy(update={name: tuple(found)}), num_cut

    async def of_inputs(self, body: InputBody) -> _Asked:
        """Makes a prompt of each input; an instruction precedes texts, not token ids."""
        instruction, pooling = self._default_instruction, Pooling()
        if isinstance(body, EmbeddingsBody):
            self._check_dimensions(body.dimensions)
            if body.input_type is not None:
                if not isinstance(body.input[0], str):
                    message = "input_type is for texts: token ids are whole prompts"
                    raise invalid_value("input_type", message)
                instruction = self._instruction(body.input_type)
            is_base64 = body.encoding_format == "base64"
            pooling = Pooling(dimensions=body.dimensions or 0, is_base64=is_base64)
        if self.can.needs_pairs and isinstance(body.prompts[0], str):
            message = "input: this model compares two texts: send pairs, [[text, text], …]"
            raise invalid_value("input", message)
        given = [(instruction, each) for each in body.prompts]
        return await self._encoded(_names("input", len(given)), given, pooling)

    async def of_queries_and_documents(self, body: RerankBody | ScoreBody) -> _Asked:
        """Makes a prompt of each text: first the queries, then the documents."""
        (first, queries), (second, documents) = _sides(body)
        texts = [(self._instruction("query"), text) for text in queries]
        texts += [(self._instruction("document"), text) for text in documents]
        names = _names(first, len(queries)) + _names(second, len(documents))
        return await self._encoded(names, texts, Pooling(num_queries=len(queries)))

    async def _encoded(
        self,
        names: Sequence[str],
        given: Sequence[tuple[str, str | tuple[int, ...]]],
        pooling: Pooling,
    ) -> _Asked:
        """Encodes each text after its instruction; token ids are whole prompts."""
        found = list[tuple[list[int], int]]()
        encoded = self._tokenizer.encode_prompts(given, self._card.context_length, self._cut)
        num_chars = sum(len(head) + len(each) for head, each in given if isinstance(each, str))
        try:
            await tokenised(lambda: found.extend(encoded), num_chars)
        except NoRoom:
            raise no_room(names[len(found)]) from None
        except TooLong as exc:
            raise self._too_long(names[exc.number], exc.over) from None
        prompts = tuple(tuple(ids) for ids, _ in found)
        return _Asked(names, prompts, sum(num_cut for _, num_cut in found), pooling)

    async def of_pairs(self, body: VectorBody) -> _Asked:
        """Makes a prompt of each pair, named like its second text."""
        (first, firsts), (second, documents) = _sides(body)
        queries = firsts * (len(documents) if len(firsts) == 1 else 1)
        instruction = self._default_instruction
        pairs = list(zip(queries, documents, strict=True))
        num_chars = sum(len(instruction) + len(query) + len(text) for query, text in pairs)
        if num_chars > MAX_PAIR_CHARS:
            message = (
                f"{second}: the pairs have {num_chars} characters, over {MAX_PAIR_CHARS} in all: "
                f"send fewer of them, or a shorter {first}"
            )
            raise invalid_value(second, message)
        names = _names(second, len(documents))
        try:
            if self.can.renders_pairs:
                return _Asked(names, *await self._rendered(pairs))
            return await tokenised(lambda: self._joined(names, pairs), num_chars)
        except TemplateRefused as exc:
            raise invalid_value(second, str(exc)) from None
        except TooLong as exc:
            number = min(exc.number, len(firsts) - 1)  # one text may be in all pairs
            text, most = instruction + firsts[number], self._card.context_length
            [alone] = await tokenised(
                lambda: list(self._tokenizer.encode_each([text], most)), len(text)
            )
            if isinstance(alone, Over):  # by itself
                raise self._too_long(_names(first, len(firsts))[number], alone) from None
            raise self._too_long(names[exc.number], exc.over) from None

    def _joined(self, names: Sequence[str], pairs: Pairs) -> _Asked:
        """Encodes pairs that the tokenizer joins; the instruction precedes the first texts. Raises
        TooLong."""
        tokenizer, cut, instruction = self._tokenizer, self._cut, self._default_instruction
        whole = [(instruction + first, second) for first, second in pairs]
        most = self._card.context_length if cut is None else cut.max_tokens
        prompts, firsts, num_cut = list[tuple[int, ...]](), list[int](), 0
        for number, found in enumerate(tokenizer.encode_pairs(whole, most)):
            if isinstance(found, Over):
                if cut is None:
                    raise TooLong(number, found)
                num_tokens = found.num_tokens
                if not found.is_exact:
                    num_tokens = sum(tokenizer.count(text) for text in whole[number])
                try:
                    found = tokenizer.cut_pair(pairs[number], cut, instruction)
                except NoRoom:
                    raise no_room(names[number]) from None
                num_cut += num_tokens - len(found[0])
            prompts.append(tuple(found[0]))
            firsts.append(found[1])
        return _Asked(names, tuple(prompts), num_cut, Pooling(first_parts=tuple(firsts)))

    async def _rendered(self, pairs: Pairs) -> tuple[Prompts, int]:
        """Returns the token ids of each pair in the model's own form, and how many were cut off.
        Only second texts are cut, so that the form stays whole. Raises TemplateRefused, and TooLong
        for a pair that still has too many tokens."""
        cut, most = self._cut, self._card.context_length
        if cut is None:
            return tuple(await self._render(pairs, most)), 0
        shown = list(pairs)
        num_cut = await self._shorten_long(shown, cut)
        prompts = await self._render(shown, None)
        for _ in range(_MAX_ROUNDS):
            lengths = enumerate(map(len, prompts))
            excess = {i: num - cut.max_tokens for i, num in lengths if num > cut.max_tokens}
            if not excess:
                break
            await self._shorten(shown, excess, cut)
            again = await self._render([shown[i] for i in excess], None)
            for i, prompt in zip(excess, again, strict=True):
                num_cut += len(prompts[i]) - len(prompt)
                prompts[i] = prompt
        for number, prompt in enumerate(prompts):
            if len(prompt) > most:
                raise TooLong(number, Over(len(prompt)))
        return tuple(prompts), num_cut

    async def _shorten_long(self, pairs: list[tuple[str, str]], cut: Cut) -> int:
        """Cuts long second texts. Returns about how many tokens were cut off. Raises TooLong if a
        first text alone has more."""
        tokenizer, most = self._tokenizer, cut.max_tokens
        long = [i for i, pair in enumerate(pairs) if max(map(len, pair)) > PIECE_CHARS]

        def shorten() -> int:
            num_cut = 0
            for number in long:
                first, second = pairs[number]
                [whole] = tokenizer.encode_each([first], most, adds_special_tokens=False)
                if isinstance(whole, Over):
                    raise TooLong(number, whole)
                found = tokenizer.shorten(second, most, keeps_end=cut.keeps_end)
                if len(found) < len(second):
                    num_cut += tokenizer.count(second) - tokenizer.count(found)
                    pairs[number] = first, found
            return num_cut

        return await tokenised(shorten, sum(sum(map(len, pairs[i])) for i in long))

    async def _shorten(
        self, pairs: list[tuple[str, str]], excess: Mapping[int, int], cut: Cut
    ) -> None:
        """Cuts tokens off second texts, but for the last one. `excess`: their number by index."""

        def shorten() -> None:
            for i, num_tokens in excess.items():
                first, second = pairs[i]
                left = max(1, self._tokenizer.count(second) - num_tokens)
                second = self._tokenizer.shorten(second, left, keeps_end=cut.keeps_end)
                pairs[i] = first, second

        await tokenised(shorten, sum(len(pairs[i][1]) for i in excess))

    async def _render(self, pairs: Pairs, most: int | None) -> list[tuple[int, ...]]:
        """Raises TemplateRefused, TooLong."""
        template = self._tokenizer.template
        if template is None:
            message = f"the model {self._card.name!r} has no chat template for pairs"
            raise invalid_value("model", message)
        rendered = await template.render_pairs(self._default_instruction, pairs)

        def encoded() -> list[tuple[int, ...]]:
            prompts = list[tuple[int, ...]]()
            for ids in self._tokenizer.encode_each(rendered, most, adds_special_tokens=False):
                if isinstance(ids, Over):
                    raise TooLong(len(prompts), ids)
                prompts.append(tuple(ids))
            return prompts

        return await tokenised(encoded, sum(map(len, rendered)))

    @property
    def _default_instruction(self) -> str:
        return self.can.prompts.get(self.can.default_prompt, "")

    def _instruction(self, name: str) -> str:
        """The instruction of this name. If a model has none for queries or documents, it is empty,
        as in sentence-transformers."""
        prompts = self.can.prompts
        if name not in prompts and name not in ("query", "document"):
            known = ", ".join(sorted({"query", "document", *prompts}))
            raise invalid_value("input_type", f"input_type must be one of {known}")
        return prompts.get(name, "")

    def _check_dimensions(self, dimensions: int | None) -> None:
        can = self.can
        if dimensions in (None, can.num_outputs, *can.dimensions):
            return
        if not can.dimensions:
            message = f"dimensions: the model declares none; its embeddings have {can.num_outputs}"
            raise invalid_value("dimensions", message)
        declared = ", ".join(map(str, sorted({*can.dimensions, can.num_outputs})))
        raise invalid_value("dimensions", f"dimensions must be one of {declared}")

    def _too_long(self, name: str, over: Over) -> ApiError:
        message = (
            f"This model's maximum context length is {self._card.context_length} tokens. However, "
            f"{name} has {over} tokens. Please reduce its length."
        )
        return bad_request(CONTEXT_EXCEEDED, message, name)


def _sides(
    body: VectorBody,
) -> tuple[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]:
    """The names and texts of both sides of a comparison."""
    if isinstance(body, InputBody):
        firsts, seconds = zip(*body.pairs, strict=True)
        return ("input", firsts), ("input", seconds)
    if isinstance(body, RerankBody):
        return ("query", (body.query,)), ("documents", body.documents)
    return ("text_1", body.text_1), ("text_2", body.text_2)


def _names(param: str, number: int) -> list[str]:
    return [param] if number == 1 else [f"{param}.{index}" for index in range(number)]
