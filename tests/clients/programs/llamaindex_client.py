"""LlamaIndex's OpenAILike."""

import importlib.metadata

from exercises import (
    BASE_URL,
    EMBEDDER,
    KEY,
    LONG_SUM,
    LONG_TOTAL,
    MODEL,
    QUESTION,
    main,
    says,
    works,
    works_on_demo,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

OPTIONS = {"api_base": BASE_URL, "api_key": KEY, "model": MODEL, "temperature": 0, "max_retries": 0}
chat = OpenAILike(is_chat_model=True, context_window=2048, **OPTIONS)
text = OpenAILike(is_chat_model=False, context_window=2048, max_tokens=5, **OPTIONS)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


@works("chat")
def whole():
    says(chat.chat(MESSAGES).message.content)


@works("chat stream")
def stream():
    says("".join(part.delta or "" for part in chat.stream_chat(MESSAGES)))


@works_on_demo("completion")
def completion():
    assert text.complete("1, 2, 3,").text.startswith(" 4")


@works_on_demo("completion stream")
def completion_stream():
    assert "".join(part.delta or "" for part in text.stream_complete("1, 2, 3,")).startswith(" 4")


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@works("tools")
def tools():
    able = OpenAILike(is_chat_model=True, is_function_calling_model=True, **OPTIONS)
    tool = FunctionTool.from_defaults(fn=add)
    answer = able.predict_and_call([tool], user_msg=LONG_SUM)
    assert int(answer.response) == LONG_TOTAL, answer


@works_on_demo("embeddings")
def embeddings():
    embedder = OpenAILikeEmbedding(
        model_name=EMBEDDER, api_base=BASE_URL, api_key=KEY, max_retries=0
    )
    one, other = embedder.get_text_embedding_batch(["A text.", "Another."])
    assert len(one) == len(other) > 1


main(importlib.metadata.version("llama-index-llms-openai-like"))
