"""What workers publish of a model so that gateways can serve it."""

import math
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec

from contract.flows import Flow
from contract.jobs import DEFAULT_LANES, Endpoint, ResumeKind
from contract.output_formats import ReasoningFormat, ToolFormat

MAX_EOS_TOKENS = 1024

_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^\S+\Z")]


MAX_PIXELS = 2**24  # of an image; decoded, four bytes each


class ImageTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that an image adds to a prompt beside those of `placeholder`, which the chat
    template writes for it. It is cut into rows of square cells: one; a grid of patches, as by
    Qwen2-VL's `smart_resize`; tiles, as Idefics3's. `most`: pixels in a grid, of tiles the longer
    side's."""

    placeholder: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    layout: Literal["one", "grid", "tiles"] = "one"
    cell: _Count = 1  # pixels of its side
    least: _Count = 1  # pixels in a grid
    most: _Count = 1
    of_image: int = 0  # tokens beside those of each row and each cell
    of_row: int = 0
    of_cell: int = 0

    def num_tokens(self, width: int, height: int) -> int:
        """`width`, `height`: in pixels, at least 1."""
        rows, columns = self.cells(width, height)
        return max(0, self.of_image + self.of_row * rows + self.of_cell * rows * columns)

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """The numbers of rows and columns, rounded as in transformers' image_processing_*.py."""
        if self.layout == "one":
            return 1, 1
        if self.layout == "tiles":
            ratio = width / height
            shorter = int(self.most / ratio if width >= height else self.most * ratio)
            shorter = max(1, shorter + shorter % 2)
            sides = (shorter, self.most) if width >= height else (self.most, shorter)
            return math.ceil(sides[0] / self.cell), math.ceil(sides[1] / self.cell)
        rows, columns = round(height / self.cell), round(width / self.cell)
        if rows * columns * self.cell**2 > self.most:
            scale = math.sqrt(height * width / self.most)
            rows = max(1, math.floor(height / scale / self.cell))
            columns = max(1, math.floor(width / scale / self.cell))
        elif rows * columns * self.cell**2 < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows = math.ceil(height * scale / self.cell)
            columns = math.ceil(width * scale / self.cell)
        return rows, columns


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine of a model's workers can do. Gateways refuse other parameters by name."""

    prompt_logprobs: bool = True
    structured_output: bool = False
    tools: bool = False
    lora: bool = False
    images: ImageTokens | None = None  # in chats; None: refused
    resume: ResumeKind = "exact"  # see ResumeKind; exact only where tests show it: `resume_kind`


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings for calls without their own: generation_config.json. None: as in OpenAI's API."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    suppress_tokens: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=1024)] = ()


class PoolingCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a prefill-only model computes from a text, or from a pair of texts."""

    # A reranker gives a pair of texts one score, a classifier gives a text or a pair several.
    kind: Literal["embedding", "classifier", "reranker"]
    num_outputs: _Count
    # Names of the scores. A reranker has one if it scores single texts, too.
    labels: Annotated[tuple[str, ...], msgspec.Meta(max_length=4096)] = ()
    activation: Literal["none", "sigmoid", "softmax"] = "none"  # the worker applies it
    dimensions: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)] = ()  # to truncate to
    # Instructions by name, which precede a text: "query" and "document" for the endpoints that have
    # them, `default_prompt` for others.
    prompts: dict[str, str] = {}
    default_prompt: str = ""  # a name; "": none
    # The chat template renders a pair, as messages of the roles "query" and "document".
    renders_pairs: bool = False
    needs_pairs: bool = False  # of a classifier: it was trained on pairs alone


ENDPOINTS_OF_KIND = {
    "embedding": (Endpoint.EMBEDDINGS, Endpoint.SCORE, Endpoint.RERANK),
    "classifier": (Endpoint.CLASSIFY,),
    "reranker": (Endpoint.RERANK, Endpoint.SCORE),
}


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a gateway needs to validate, render and tokenise requests for a model. Decoding checks
    the bounds, because gateways do not trust workers.
    """

    name: _Name
    context_length: _Count  # prompt + output, in tokens
    vocab_size: _Count
    eos_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_EOS_TOKENS)]
    tokenizer_sha256: Annotated[
        str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")
    ]  # see encode_tokenizer
    created_s: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    # The lanes that its workers serve, most urgent first.
    lanes: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=64)] = DEFAULT_LANES
    capabilities: Capabilities = Capabilities()
    generation: GenerationDefaults = GenerationDefaults()
    reasoning_parser: Annotated[str, msgspec.Meta(max_length=64)] = ""  # "": does not reason
    tool_call_parser: Annotated[str, msgspec.Meta(max_length=64)] = ""  # "": calls no tools
    pooling: PoolingCard | None = None  # of a prefill-only model
    truncates: bool = False  # cuts prompts that are too long, unless a call says otherwise
    hub_names: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=2)] = ()  # `org/name`, `name`
    flow: Flow | None = None  # of a model that consists of others

    @cached_property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints that the model can answer; for a flow, those of its definition."""
        if self.flow is not None:
            return self.flow.endpoints
        if self.pooling is None:
            return Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES
        found = ENDPOINTS_OF_KIND[self.pooling.kind]
        scores_texts = self.pooling.kind == "reranker" and self.pooling.labels
        return (*found, Endpoint.CLASSIFY) if scores_texts else found


MAX_TOKENIZER_BYTES = 32 * 2**20  # of TokenizerFiles in msgpack, plain and compressed


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model's tokenizer in the format of `tokenizers`, and its chat template."""

    tokenizer_json: str
    chat_template: str | None
    tool_template: str | None = None  # for chats with tools; None: the same
    special_tokens: dict[str, str] = {}  # bos_token, eos_token …: variables of the template
    # Other variables that the templates read, such as enable_thinking, and the operator's values.
    template_variables: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()
    template_kwargs: dict[str, Any] = {}
    # The template wants the arguments of past calls as JSON strings, not as objects.
    string_arguments: bool = False
    null_content: bool = False  # it shows the calls of a past message only if content is null
    reasoning: ReasoningFormat | None = None  # None: the model does not reason
    tool_format: ToolFormat | None = None  # None: not known, so the model calls no tools
