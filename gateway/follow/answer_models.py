"""Response models, for the OpenAPI document. `answers` and `vector_answers` build dicts instead,
because validating long lists of numbers would take longer than building them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

EndpointPath = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/responses",
]
FinishReason = Literal["stop", "length", "tool_calls"] | None


class Shown(BaseModel):
    """A model that is built only when the OpenAPI document is asked for."""

    model_config = ConfigDict(defer_build=True)


class OutputDetails(Shown):
    reasoning_tokens: int


CutTokens = Annotated[
    int | None,
    Field(exclude_if=lambda number: number is None, description="cut off the prompts, if asked"),
]


class Usage(Shown):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    truncated_tokens: CutTokens = None


class ChatUsage(Usage):
    completion_tokens_details: OutputDetails


class CalledFunction(Shown):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(Shown):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shown):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = Field(default="", description="of models that reason")
    tool_calls: list[ToolCall] = []


class PromptTokenLogprob(Shown):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class ChatTokenLogprob(Shown):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprobs(ChatTokenLogprob):
    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(Shown):
    content: list[ChatTokenLogprobs]
    refusal: None


class ChatChoice(Shown):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default=[], description="with return_token_ids")


class ChatCompletion(Shown):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: ChatUsage
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = None


class TextLogprobs(Shown):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Shown):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default=[], description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(Shown):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[TextChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")


class PromptUsage(Shown):
    prompt_tokens: int
    total_tokens: int
    truncated_tokens: CutTokens = None


class Embedding(Shown):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="base64: float32, little-endian")


class Embeddings(Shown):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage


class RankedText(Shown):
    text: str


class RankedDocument(Shown):
    index: int
    document: RankedText | None = Field(default=None, description="with return_documents")
    relevance_score: float


class Ranking(Shown):
    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]


class Score(Shown):
    index: int
    object: Literal["score"]
    score: float


class Scores(Shown):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class Class(Shown):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Shown):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: PromptUsage
