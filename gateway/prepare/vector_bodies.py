"""Request bodies for prefill-only models: in OpenAI's format (embeddings), Cohere's and Jina's
(rerank), and vLLM's (score, classify; pairs to classify are TEI's).

vectors.py checks what depends on the model.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeGuard, TypeVar, cast

from pydantic import BeforeValidator, Field, model_validator

from gateway.prepare.schemas import TokenIds, TruncatedTexts, token_ids
from gateway.prepare.unsupported import CallFields, StrictModel, none_of, refusal

_NO_IDS = "must be a list of token ids that is not empty"
MAX_INPUTS = 2048  # as OpenAI allows
# Parameters of other servers -> values without effect.
UNSUPPORTED_OF_VECTORS = {
    **none_of("chat_template max_chunks_per_doc normalize relevant_spans"),
    **none_of("activation add_special_tokens use_activation", True),
    **none_of("chat_template_kwargs mm_processor_kwargs", {}),
    **none_of("embed_dtype", "float32"),
    **none_of("rank_fields", ["text"]),
    **none_of("stream", False),
}

# What the OpenAPI document says of fields with validators of their own.
_Item = TypeVar("_Item")
_Several = Annotated[list[_Item], Field(min_length=1, max_length=MAX_INPUTS)]
_Text = Annotated[str, Field(min_length=1)]
_Inputs = _Text | _Several[_Text] | TokenIds | _Several[TokenIds]
_Pair = Annotated[list[_Text], Field(min_length=2, max_length=2)]


def _items(value: Any, what: str) -> list[Any]:
    """A non-empty list that is not too long. Raises PydanticCustomError."""
    if not isinstance(value, list) or not value:
        raise refusal(f"must be {what}, and not empty")
    if len(value) > MAX_INPUTS:
        raise refusal(f"at most {MAX_INPUTS} of them, not {len(value)}")
    return value


def _texts(value: Any) -> Any:
    """A string or a list of strings, as a tuple."""
    if isinstance(value, str) and value:
        return (value,)
    items = _items(value, "a string or a list of strings")
    for number, item in enumerate(items):
        if not isinstance(item, str) or not item:
            raise refusal("must be a string that is not empty", str(number))
    return tuple(items)


def _inputs(value: Any) -> Any:
    """Strings, or lists of token ids, as a tuple; one of them may stand without a list."""
    if not isinstance(value, list) or not value or isinstance(value[0], str):
        return _texts(value)
    if not isinstance(value[0], list):
        return (token_ids(value, _NO_IDS),)
    items = _items(value, "a list of token ids")
    return tuple(token_ids(item, _NO_IDS, str(number)) for number, item in enumerate(items))


def _inputs_or_pairs(value: Any) -> Any:
    """As `_inputs`, or pairs of strings as a tuple."""
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, list) or not first or not isinstance(first[0], str):
        return _inputs(value)
    for number, item in enumerate(_items(value, "a list of pairs")):
        is_pair = isinstance(item, list) and len(item) == 2
        if not is_pair or not all(isinstance(text, str) and text for text in item):
            raise refusal("must be a pair of strings that are not empty", str(number))
    return tuple(map(tuple, value))


def _documents(value: Any) -> Any:
    """The texts of documents, as a tuple."""
    texts = []
    for number, item in enumerate(_items(value, "a list of documents")):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str) or not text:
            raise refusal('must be a string, or {"text": …}, and not empty', str(number))
        texts.append(text)
    return tuple(texts)


_Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_texts, json_schema_input_type=_Text | _Several[_Text]),
    Field(description="one with one, one with each of the others, or each with its own"),
]


def _is_pair(given: object) -> TypeGuard[tuple[str, str]]:
    return isinstance(given, tuple) and isinstance(given[0], str)


class _VectorFields(TruncatedTexts, CallFields):
    unasked = UNSUPPORTED_OF_VECTORS


class InputBody(_VectorFields):
    """A call that asks for a vector of each input. All inputs are pairs of texts, or none is."""

    input: tuple[str | tuple[int, ...] | tuple[str, str], ...]

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        """The inputs if they are pairs."""
        return [each for each in self.input if _is_pair(each)]

    @property
    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        """The inputs; of pairs, both texts."""
        texts = [text for pair in self.pairs for text in pair]
        return texts or cast("Sequence[str | tuple[int, ...]]", self.input)


class EmbeddingsBody(InputBody):
    """POST /v1/embeddings. `input_type` names the model's instruction that precedes each text."""

    input: Annotated[
        tuple[str | tuple[int, ...], ...],
        BeforeValidator(_inputs, json_schema_input_type=_Inputs),
    ] = Field(description="texts or token ids")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`base64`: of float32, little-endian; default: `float`"
    )
    dimensions: int | None = Field(None, ge=1, lt=2**31, description="declared size; default: all")
    input_type: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="`query`, `document` or another instruction; default: the model's"
    )


class ClassifyBody(InputBody):
    """POST /v1/classify."""

    input: Annotated[
        tuple[str | tuple[int, ...] | tuple[str, str], ...],
        BeforeValidator(_inputs_or_pairs, json_schema_input_type=_Inputs | _Several[_Pair]),
    ] = Field(description="texts, token ids, or pairs of texts")


_MAX_TOKENS = "tokens read of each document or `text_2`; 0, as in vLLM, and default: all"
MaxTokens = Annotated[int | None, Field(ge=0, lt=2**31, description=_MAX_TOKENS)]
_OBJECTS = {"documents": frozenset({"text"})}


class RerankDocument(StrictModel):
    text: _Text


class RerankBody(_VectorFields):
    """POST /v1/rerank."""

    names_of_objects = _OBJECTS

    query: str = Field(min_length=1, description="what the documents are to be relevant to")
    documents: Annotated[
        tuple[str, ...],
        BeforeValidator(_documents, json_schema_input_type=_Several[_Text | RerankDocument]),
    ] = Field(description="the texts to order")
    top_n: int | None = Field(None, ge=0, lt=2**31, description="results; 0, default: all")
    max_tokens_per_doc: MaxTokens = None
    return_documents: bool | None = Field(None, description="with each result; default: false")


class ScoreBody(_VectorFields):
    """POST /v1/score: one text with each of the others, or the first with the first and so on."""

    text_1: _Texts
    text_2: _Texts
    max_tokens_per_doc: MaxTokens = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        num_first, num_second = len(self.text_1), len(self.text_2)
        if num_first not in (1, num_second):
            message = f"must be as many texts as text_1 has, {num_first}, not {num_second}"
            raise refusal(message, "text_2")
        return self


VectorBody = EmbeddingsBody | ClassifyBody | RerankBody | ScoreBody
