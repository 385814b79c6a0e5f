"""Response models, for the OpenAPI document. `answers` and `vector_answers` build dicts instead,
because validating long lists of numbers would take longer than building them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from gateway.http.errors import invalid_value

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


class PromptDetails(Shown):
    cached_tokens: int = Field(description="found in the model's prefix cache")


class Usage(Shown):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
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


class StoredChat(ChatCompletion):
    """With what its request asked for."""

    metadata: dict[str, str]


class DeletedChat(BaseModel):
    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True


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


class Vectors(Shown):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Any]
    usage: PromptUsage


class Embeddings(Vectors):
    data: list[Embedding]


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


class Scores(Vectors):
    data: list[Score]


class Class(Shown):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Vectors):
    data: list[Class]


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    truncated_tokens: CutTokens = None


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """A response. The fields of its request come with their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[dict[str, Any]] = Field(description="messages, reasoning and function calls")
    usage: ResponseUsage | None
    background: bool
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Page(BaseModel):
    """A page of a list. `last_id` is the `after` of the next one."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, found: Sequence[Any], limit: int) -> Self:
        """A page of at most `limit` of the objects that were found."""
        page = found[:limit]
        ids = [each["id"] if isinstance(each, dict) else each.id for each in page]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        return cls(data=list(page), first_id=first, last_id=last, has_more=len(found) > limit)


class ChatList(Page):
    data: list[StoredChat]


class ItemList(Page):
    data: list[dict[str, Any]]

    @classmethod
    def ordered(cls, items: list[Any], order: str, after: str | None, limit: int) -> Self:
        """A page of items, which come with `asc` as they are. Raises ApiError."""
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise invalid_value("after", "after is the id of none of these items")
        return cls.of(items[0 if after is None else ids.index(after) + 1 :], limit)


class MessageObject(Shown):
    """Anthropic's."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="`text`, `thinking` and `tool_use`")
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, Any]


class MessageTokens(BaseModel):
    input_tokens: int


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
