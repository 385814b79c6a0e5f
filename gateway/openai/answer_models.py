"""Response models, for the OpenAPI document. `answers` and `vector_answers` build dicts instead,
because validating long lists of numbers would take longer than building them."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

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


class OutputDetails(BaseModel):
    reasoning_tokens: int


CutTokens = Annotated[
    int | None,
    Field(exclude_if=lambda number: number is None, description="cut off the prompts, if asked"),
]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    truncated_tokens: CutTokens = None


class ChatUsage(Usage):
    completion_tokens_details: OutputDetails


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = Field(default="", description="of models that reason")
    tool_calls: list[ToolCall] = []


class PromptTokenLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class ChatTokenLogprob(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprobs(ChatTokenLogprob):
    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprobs]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default=[], description="with return_token_ids")


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: ChatUsage
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = None


class TextLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default=[], description="with return_token_ids")
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[TextChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")


class PromptUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    truncated_tokens: CutTokens = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="base64: float32, little-endian")


class Embeddings(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int
    document: RankedText | None = Field(default=None, description="with return_documents")
    relevance_score: float


class Ranking(BaseModel):
    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class Scores(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class Class(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: PromptUsage
