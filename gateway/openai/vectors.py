"""Turns a call for vectors into a prefill-only job: applies the model's instructions, tokenises
texts and pairs, checks them against the model."""

from collections.abc import Sequence

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
from gateway.openai.admission import Admission, Prompts, check_ids, tokenised
from gateway.openai.tokens import ModelTokenizer
from gateway.openai.vector_bodies import (
    EmbeddingsBody,
    InputBody,
    RerankBody,
    ScoreBody,
    VectorBody,
)

# Of a call's pairs or rendered texts: a query that is repeated for each document adds up.
MAX_PAIR_CHARS = 4 * 1024 * 1024
_BYTES_PER_NUMBER = 4  # float32
_VECTOR_OVERHEAD_BYTES = 32  # of an event's part


class _Asked(msgspec.Struct, frozen=True):
    """A job's prompts, their parameter names in errors, and what is computed from them."""

    names: Sequence[str]
    prompts: Prompts
    pooling: Pooling = Pooling()


async def prepare_vectors(admission: Admission, body: VectorBody) -> tuple[Job, Submission]:
    """Returns the job and its submission. Raises ApiError."""
    card = admission.card
    can = card.pooling
    assert can is not None, "the model answers such calls"
    tokenizer = await admission.broker.known.tokenizer(card)
    if isinstance(body, InputBody) and not body.pairs:
        asked = await _inputs(tokenizer, can, body)
    elif can.kind == "embedding":
        assert not isinstance(body, InputBody), "no embedding of a pair can be asked for"
        asked = await _queries_and_documents(tokenizer, can, body)
    else:
        asked = await _pairs(tokenizer, can, card.name, body)
        await _check_first_text(tokenizer, card, asked, body)
    _check_prompts(card, asked)
    pooling = asked.pooling
    if isinstance(body, RerankBody):
        documents = body.documents if body.return_documents else ()
        top_n = body.top_n or None
        pooling = msgspec.structs.replace(pooling, documents=documents, top_n=top_n)
    job = admission.job(asked.prompts, SamplingParams(max_tokens=0, seed=0))
    job = msgspec.structs.replace(job, pooling=pooling)
    num_numbers = pooling.dimensions or can.num_outputs
    vector_bytes = len(asked.prompts) * (num_numbers * _BYTES_PER_NUMBER + _VECTOR_OVERHEAD_BYTES)
    return job, await admission.submission(max_output_tokens=0, vector_bytes=vector_bytes)


async def _inputs(tokenizer: ModelTokenizer, can: PoolingCard, body: InputBody) -> _Asked:
    """A prompt of each input; an instruction precedes texts, not token ids."""
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
    return _Asked(
        _names("input", len(body.prompts)),
        await _encoded(tokenizer, [(instruction, each) for each in body.prompts]),
        pooling,
    )


async def _queries_and_documents(
    tokenizer: ModelTokenizer, can: PoolingCard, body: RerankBody | ScoreBody
) -> _Asked:
    """A prompt of each text: first the queries, then the documents."""
    (first, queries), (second, documents) = _sides(body)
    of_queries, of_documents = _instruction(can, "query"), _instruction(can, "document")
    texts = [(of_queries, text) for text in queries] + [(of_documents, text) for text in documents]
    return _Asked(
        _names(first, len(queries)) + _names(second, len(documents)),
        await _encoded(tokenizer, texts),
        Pooling(num_queries=len(queries)),
    )


async def _pairs(
    tokenizer: ModelTokenizer, can: PoolingCard, model: str, body: VectorBody
) -> _Asked:
    """A prompt of each pair, named as its second text."""
    (first, queries), (second, documents) = _sides(body)
    if len(queries) == 1:
        queries *= len(documents)
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
    if not can.renders_pairs:

        def encoded() -> tuple[Prompts, tuple[int, ...]]:
            found = tokenizer.encode_pairs([(instruction + query, text) for query, text in pairs])
            return tuple(tuple(ids) for ids, _ in found), tuple(length for _, length in found)

        prompts, first_parts = await tokenised(encoded, num_chars)
        return _Asked(names, prompts, Pooling(first_parts=first_parts))
    if tokenizer.template is None:
        raise invalid_value("model", f"the model {model!r} has no chat template for pairs")
    try:
        rendered = await tokenizer.template.render_pairs(instruction, pairs)
    except TemplateRefused as exc:
        raise invalid_value(second, str(exc)) from None
    prompts = await tokenised(
        lambda: tuple(map(tuple, tokenizer.encode_texts(rendered, adds_special_tokens=False))),
        sum(map(len, rendered)),
    )
    return _Asked(names, prompts)


async def _check_first_text(
    tokenizer: ModelTokenizer, card: ModelCard, asked: _Asked, body: VectorBody
) -> None:
    """Raises ApiError if the first text of the first pair that is too long is so by itself."""
    (first, texts), _ = _sides(body)
    lengths = map(len, asked.prompts)
    number = next((i for i, length in enumerate(lengths) if length > card.context_length), None)
    if number is None or card.pooling is None:
        return
    number = min(number, len(texts) - 1)  # one text may be in all pairs
    text = _default_instruction(card.pooling) + texts[number]
    ids = await tokenised(lambda: tokenizer.encode_text(text), len(text))
    if len(ids) > card.context_length:
        raise _too_long(_names(first, len(texts))[number], len(ids), card)


async def _encoded(
    tokenizer: ModelTokenizer, given: Sequence[tuple[str, str | tuple[int, ...]]]
) -> Prompts:
    """The token ids of each text after its instruction; token ids stay as they are."""
    texts = [instruction + each for instruction, each in given if isinstance(each, str)]

    def encoded() -> Prompts:
        found = iter(tokenizer.encode_texts(texts))
        return tuple(tuple(next(found)) if isinstance(each, str) else each for _, each in given)

    return await tokenised(encoded, sum(map(len, texts)))


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
    """The instruction of a name. Models without one for queries or documents have none for them, as
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
    """Raises ApiError for a prompt without tokens, with unknown ones, or over the context."""
    for name, prompt_ids in zip(asked.names, asked.prompts, strict=True):
        if not prompt_ids:
            raise invalid_value(name, f"{name} has no tokens")
        check_ids(name, prompt_ids, card)
        if len(prompt_ids) > card.context_length:
            raise _too_long(name, len(prompt_ids), card)


def _too_long(name: str, num_tokens: int, card: ModelCard) -> ApiError:
    message = (
        f"This model's maximum context length is {card.context_length} tokens. However, {name} has "
        f"{num_tokens} tokens. Please reduce its length."
    )
    return bad_request(CONTEXT_EXCEEDED, message, name)
