"""The output that a quote predicts, where earlier outputs were short."""

from typing import Any

import httpx
import pytest

from tests.gateway.fake_worker import MODEL, FakeWorker, says

pytestmark = pytest.mark.anyio

LANE = "standard"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 50}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 50}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LEARNED = 3  # tokens of the worker's outputs
NUM_OUTPUTS = 5  # until they predict others


@pytest.mark.parametrize(
    ("endpoint", "body", "predicted"),
    [
        (COMPLETIONS, BODY, LEARNED),
        (COMPLETIONS, BODY | {"ignore_eos": True}, 50),
        (COMPLETIONS, BODY | {"ignore_eos": True, "n": 2}, 100),
        (COMPLETIONS, BODY | {"ignore_eos": True, "prompt": ["a", "b", "cd"]}, 150),
        (COMPLETIONS, BODY | {"ignore_eos": True, "expected_output_tokens": 7}, 50),
        # The context of 512 has room for 4 more tokens.
        (COMPLETIONS, BODY | {"ignore_eos": True, "prompt": ["a", "b" * 508]}, 54),
        (COMPLETIONS, BODY | {"ignore_eos": True, "stop": "x"}, 50),
        (COMPLETIONS, BODY | {"ignore_eos": True, "stop_token_ids": [65]}, 50),
        (COMPLETIONS, BODY | {"ignore_eos": False}, LEARNED),
        (COMPLETIONS, BODY | {"min_tokens": 9, "expected_output_tokens": 7}, 9),
        (CHATS, CHAT, LEARNED),
        (CHATS, CHAT | {"ignore_eos": True}, 50),
        (CHATS, CHAT | {"ignore_eos": True, "stop": []}, 50),
    ],
)
async def test_what_ends_at_max_tokens_alone_is_quoted_with_all_of_them(
    worker: FakeWorker, http: httpx.AsyncClient, endpoint: str, body: dict[str, Any], predicted: int
) -> None:
    """Otherwise earlier outputs tell."""
    worker.script = says("abc")
    for _ in range(NUM_OUTPUTS):
        assert (await http.post(COMPLETIONS, json=BODY)).status_code == 200
    asked = {"endpoint": endpoint, "body": body, "lane": LANE}
    quote = (await http.post("/v1/quote", json=asked)).json()
    assert quote["predicted_output_tokens"] == predicted, quote
