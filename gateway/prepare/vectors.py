"""Turns a call for vectors into a prefill-only job: applies the model's instructions, tokenises
texts and pairs, checks them against the model.

Over 300 lines: texts and pairs are tokenised, cut and refused side by side.
"""

from collections.abc import Mapping, Sequence

import msgspec

from contract.function_types import Submission
from contract.jobs import Job, Pooling, SamplingParams
from contract.model_cards import ModelCard, PoolingCard
from gateway.http.errors import (
    CONTEXT_EXCEEDED,
    ApiError,
    TemplateRefused,
    bad_request,
    invalid_value,
)
from gateway.models.long_texts import PIECE_CHARS, Over
from gateway.models.tokens import Cut, ModelTokenizer, NoRoom, TemplateProcess, TooLong
from gateway.prepare.admission import Admission, Prompts, check_ids, tokenised
from gateway.prepare.unsupported import no_room
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


def joined_pairs(
    tokenizer: ModelTokenizer,
    names: Sequence[str],
    instruction: str,
    pairs: Pairs,
    most: int,
    cut: Cut | None,
) -> tuple[Prompts, int, tuple[int, ...]]:
    """Returns the token ids of each pair, how many were cut off, and how many of each prompt belong
    to the first text, which follows the instruction. `names`: of pairs, in errors. Raises ApiError,
    and TooLong for a pair of more than `most` tokens that is not to be cut."""
    whole = [(instruction + first, second) for first, second in pairs]
    encoded = tokenizer.encode_pairs(whole, most if cut is None else cut.max_tokens)
    prompts, firsts, num_cut = list[tuple[int, ...]](), list[int](), 0
    for number, found in enumerate(encoded):
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
    return tuple(prompts), num_cut, tuple(firsts)


async def rendered_pairs(
    tokenizer: ModelTokenizer,
    template: TemplateProcess,
    instruction: str,
    pairs: Pairs,
    most: int,
    cut: Cut | None,
) -> tuple[Prompts, int]:
    """Returns the token ids of each pair in the model's own form, and how many were cut off. Only
    second texts are cut, so that the form stays whole. Raises TemplateRefused, and TooLong for a
    pair that still has more than `most` tokens."""
    shown, num_cut = list(pairs), 0
    if cut is not None:
        limit = cut.max_tokens
        num_cut = await _shorten_long(tokenizer, shown, limit, keeps_end=cut.keeps_end)
    prompts = await _encoded_pairs(
        tokenizer, template, instruction, shown, most if cut is None else None
    )
    for _ in range(_MAX_ROUNDS if cut else 0):
        assert cut is not None
        lengths = map(len, prompts)
        excess = {i: num - cut.max_tokens for i, num in enumerate(lengths) if num > cut.max_tokens}
        if not excess:
            break
        await _shorten(tokenizer, shown, excess, keeps_end=cut.keeps_end)
        parts = [shown[i] for i in excess]
        again = await _encoded_pairs(tokenizer, template, instruction, parts, None)
        for i, prompt in zip(excess, again, strict=True):
            num_cut += len(prompts[i]) - len(prompt)
            prompts[i] = prompt
    for number, prompt in enumerate(prompts):
        if len(prompt) > most:
            raise TooLong(number, Over(len(prompt)))
    return tuple(prompts), num_cut


async def _shorten_long(
    tokenizer: ModelTokenizer, pairs: list[tuple[str, str]], most: int, *, keeps_end: bool
) -> int:
    """Cuts long second texts to `most` tokens. Returns about how many were cut off. Raises TooLong
    if a first text alone has more."""
    is_long = [any(len(text) > PIECE_CHARS for text in pair) for pair in pairs]

    def shorten() -> int:
        num_cut = 0
        for number in (i for i, each in enumerate(is_long) if each):
            first, second = pairs[number]
            [whole, *_] = tokenizer.encode_each([first], most, adds_special_tokens=False)
            if isinstance(whole, Over):
                raise TooLong(number, whole)
            found = tokenizer.shorten(second, most, keeps_end=keeps_end)
            if len(found) < len(second):
                num_cut += tokenizer.count(second) - tokenizer.count(found)
                pairs[number] = first, found
        return num_cut

    num_chars = sum(sum(map(len, pair)) for pair, each in zip(pairs, is_long, strict=True) if each)
    return await tokenised(shorten, num_chars)


async def _shorten(
    tokenizer: ModelTokenizer,
    pairs: list[tuple[str, str]],
    excess: Mapping[int, int],
    *,
    keeps_end: bool,
) -> None:
    """Cuts tokens off second texts, but for the last one. `excess`: their number by index."""

    def shorten() -> None:
        for i, num_tokens in excess.items():
            first, second = pairs[i]
            left = max(1, tokenizer.count(second) - num_tokens)
            pairs[i] = first, tokenizer.shorten(second, left, keeps_end=keeps_end)

    await tokenised(shorten, sum(len(pairs[i][1]) for i in excess))


async def _encoded_pairs(
    tokenizer: ModelTokenizer,
    template: TemplateProcess,
    instruction: str,
    pairs: Pairs,
    most: int | None,
) -> list[tuple[int, ...]]:
    """Raises TooLong."""
    rendered = await template.render_pairs(instruction, pairs)

    def encoded() -> list[tuple[int, ...]]:
        prompts = list[tuple[int, ...]]()
        for ids in tokenizer.encode_each(rendered, most, adds_special_tokens=False):
            if isinstance(ids, Over):
                raise TooLong(len(prompts), ids)
            prompts.append(tuple(ids))
        return prompts

    return await tokenised(encoded, sum(map(len, rendered)))


class _Asked(msgspec.Struct, frozen=True):
    """A job's prompts, their parameter names in errors, and what is computed from them."""

    names: Sequence[str]
    prompts: Prompts
    num_cut: int  # tokens
    pooling: Pooling = Pooling()


async def prepare_vectors(admission: Admission, body: VectorBody) -> tuple[Job, Submission]:
    """Returns the job and its submission. Raises ApiError."""
    card = admission.card
    can = card.pooling
    assert can is not None, "the model answers such calls"
    tokenizer = await admission.gateway.broker.known.tokenizer(card)
    cut, shown = body.cut_texts(card), body
    body, num_cut = await _with_short_documents(tokenizer, body)
    if isinstance(body, InputBody) and not body.pairs:
        asked = await _inputs(tokenizer, card, body, cut)
    elif can.kind == "embedding":
        assert not isinstance(body, InputBody), "no embedding of a pair can be asked for"
        asked = await _queries_and_documents(tokenizer, card, body, cut)
    else:
        asked = await _pairs(tokenizer, card, body, cut)
    _check_prompts(card, asked)
    pooling = asked.pooling
    if isinstance(shown, RerankBody):
        documents = shown.documents if shown.return_documents else ()
        top_n = shown.top_n or None
        pooling = msgspec.structs.replace(pooling, documents=documents, top_n=top_n)
    job = admission.job(asked.prompts, SamplingParams(max_tokens=0, seed=0))
    may_cut = cut is not None or body is not shown
    num_cut_tokens = num_cut + asked.num_cut if may_cut else None
    job = msgspec.structs.replace(job, pooling=pooling, num_cut_tokens=num_cut_tokens)
    num_numbers = pooling.dimensions or can.num_outputs
    vector_bytes = len(asked.prompts) * (num_numbers * _BYTES_PER_NUMBER + _VECTOR_OVERHEAD_BYTES)
    return job, await admission.submission(max_output_tokens=0, vector_bytes=vector_bytes)


async def _with_short_documents(
    tokenizer: ModelTokenizer, body: VectorBody
) -> tuple[VectorBody, int]:
    """Returns the body with documents cut to `max_tokens_per_doc`, and how many tokens that cuts
    off; the same body if there is no limit."""
    if isinstance(body, InputBody) or not body.max_tokens_per_doc:
        return body, 0
    most = body.max_tokens_per_doc
    name = "documents" if isinstance(body, RerankBody) else "text_2"
    texts: tuple[str, ...] = getattr(body, name)

    def shortened() -> tuple[list[str], int]:
        found = [tokenizer.shorten(text, most) for text in texts]
        before, after = (sum(map(tokenizer.count, each)) for each in (texts, found))
        return found, before - after

    found, num_cut = await tokenised(shortened, sum(map(len, texts)))
    return body.model_copy(update={name: tuple(found)}), num_cut


async def _inputs(
    tokenizer: ModelTokenizer, card: ModelCard, body: InputBody, cut: Cut | None
) -> _Asked:
    """Makes a prompt of each input; an instruction precedes texts, not token ids."""
    can = card.pooling
    assert can is not None
    instruction, pooling = _default_instruction(can), Pooling()
    if isinstance(body, EmbeddingsBody):
        _check_dimensions(can, body.dimensions)
        if body.input_type is not None:
            if not isinstance(body.input[0], str):
                message = "input_type is for texts: token ids are whole prompts"
                raise invalid_value("input_type", message)
            instruction = _instruction(can, body.input_type)
        is_base64 = body.encoding_format == "base64"
        pooling = Pooling(dimensions=body.dimensions or 0, is_base64=is_base64)
    if can.needs_pairs and isinstance(body.prompts[0], str):
        message = "input: this model compares two texts: send pairs, [[text, text], …]"
        raise invalid_value("input", message)
    names = _names("input", len(body.prompts))
    given = [(instruction, each) for each in body.prompts]
    return _Asked(names, *await _encoded(tokenizer, card, names, given, cut), pooling)


async def _queries_and_documents(
    tokenizer: ModelTokenizer, card: ModelCard, body: RerankBody | ScoreBody, cut: Cut | None
) -> _Asked:
    """Makes a prompt of each text: first the queries, then the documents."""
    can = card.pooling
    assert can is not None
    (first, queries), (second, documents) = _sides(body)
    of_queries, of_documents = _instruction(can, "query"), _instruction(can, "document")
    texts = [(of_queries, text) for text in queries] + [(of_documents, text) for text in documents]
    names = _names(first, len(queries)) + _names(second, len(documents))
    pooling = Pooling(num_queries=len(queries))
    return _Asked(names, *await _encoded(tokenizer, card, names, texts, cut), pooling)


async def _pairs(
    tokenizer: ModelTokenizer, card: ModelCard, body: VectorBody, cut: Cut | None
) -> _Asked:
    """Makes a prompt of each pair, named like its second text."""
    can = card.pooling
    assert can is not None
    (first, firsts), (second, documents) = _sides(body)
    queries = firsts * (len(documents) if len(firsts) == 1 else 1)
    instruction = _default_instruction(can)
    pairs = list(zip(queries, documents, strict=True))
    num_chars = sum(len(instruction) + len(query) + len(text) for query, text in pairs)
    if num_chars > MAX_PAIR_CHARS:
        message = (
            f"{second}: the pairs have {num_chars} characters, over {MAX_PAIR_CHARS} in all: "
            f"send fewer of them, or a shorter {first}"
        )
        raise invalid_value(second, message)
    names = _names(second, len(documents))
    if can.renders_pairs and tokenizer.template is None:
        raise invalid_value("model", f"the model {card.name!r} has no chat template for pairs")
    most = card.context_length
    try:
        if can.renders_pairs:
            assert tokenizer.template is not None
            rendered = rendered_pairs(tokenizer, tokenizer.template, instruction, pairs, most, cut)
            return _Asked(names, *await rendered)
        prompts, num_cut, first_parts = await tokenised(
            lambda: joined_pairs(tokenizer, names, instruction, pairs, most, cut), num_chars
        )
    except TemplateRefused as exc:
        raise invalid_value(second, str(exc)) from None
    except TooLong as exc:
        number = min(exc.number, len(firsts) - 1)  # one text may be in all pairs
        text = instruction + firsts[number]
        alone = await tokenised(lambda: list(tokenizer.encode_each([text], most)), len(text))
        if isinstance(alone[0], Over):  # by itself
            raise _too_long(_names(first, len(firsts))[number], alone[0], card) from None
        raise _too_long(names[exc.number], exc.over, card) from None
    return _Asked(names, prompts, num_cut, Pooling(first_parts=first_parts))


async def _encoded(
    tokenizer: ModelTokenizer,
    card: ModelCard,
    names: Sequence[str],
    given: Sequence[tuple[str, str | tuple[int, ...]]],
    cut: Cut | None,
) -> tuple[Prompts, int]:
    """Returns the token ids of each text after its instruction, and how many were cut off; token
    ids are whole prompts. Raises ApiError."""
    texts = [instruction + each for instruction, each in given if isinstance(each, str)]
    most = card.context_length if cut is None else cut.max_tokens

    def encoded() -> tuple[Prompts, int]:
        found = tokenizer.encode_each(texts, most)
        prompts, num_cut = list[tuple[int, ...]](), 0
        for name, (instruction, each) in zip(names, given, strict=True):
            whole: Sequence[int] | Over = each if not isinstance(each, str) else next(found)
            if not isinstance(whole, Over) and len(whole) > most:
                whole = Over(len(whole))
            if isinstance(whole, Over):
                if cut is None:
                    raise _too_long(name, whole, card)
                try:
                    kept = _cut(tokenizer, instruction, each, cut)
                except NoRoom:
                    raise no_room(name) from None
                num_tokens = whole.num_tokens
                if isinstance(each, str) and not whole.is_exact:
                    num_tokens = tokenizer.count(instruction + each, adds_special_tokens=True)
                num_cut += num_tokens - len(kept)
                whole = kept
            prompts.append(tuple(whole))
        return tuple(prompts), num_cut

    return await tokenised(encoded, sum(map(len, texts)))


def _cut(
    tokenizer: ModelTokenizer, instruction: str, given: str | tuple[int, ...], cut: Cut
) -> list[int]:
    """Returns the token ids of a prompt that is cut. Raises NoRoom."""
    if isinstance(given, str):
        return tokenizer.cut_text(given, cut, instruction)
    return tokenizer.cut_ids(given, cut)


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


def _default_instruction(can: PoolingCard) -> str:
    return can.prompts.get(can.default_prompt, "")


def _instruction(can: PoolingCard, name: str) -> str:
    """The instruction of this name. If a model has none for queries or documents, it is empty, as
    in sentence-transformers. Raises ApiError for other names."""
    if name in can.prompts:
        return can.prompts[name]
    if name not in ("query", "document"):
        known = ", ".join(sorted({"query", "document", *can.prompts}))
        raise invalid_value("input_type", f"input_type must be one of {known}")
    return ""


def _check_dimensions(can: PoolingCard, dimensions: int | None) -> None:
    if dimensions in (None, can.num_outputs, *can.dimensions):
        return
    if not can.dimensions:
        message = f"dimensions: the model declares none; its embeddings have {can.num_outputs}"
        raise invalid_value("dimensions", message)
    declared = ", ".join(map(str, sorted({*can.dimensions, can.num_outputs})))
    raise invalid_value("dimensions", f"dimensions must be one of {declared}")


def _check_prompts(card: ModelCard, asked: _Asked) -> None:
    """Raises ApiError for a prompt without tokens, or with unknown ones."""
    for name, prompt_ids in zip(asked.names, asked.prompts, strict=True):
        if not prompt_ids:
            raise invalid_value(name, f"{name} has no tokens")
        check_ids(name, prompt_ids, card)


def _too_long(name: str, over: Over, card: ModelCard) -> ApiError:
    message = (
        f"This model's maximum context length is {card.context_length} tokens. However, {name} has "
        f"{over} tokens. Please reduce its length."
    )
    return bad_request(CONTEXT_EXCEEDED, message, name)
