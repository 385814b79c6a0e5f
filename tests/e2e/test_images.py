"""Chats with images through `batchway up` and vLLM: the tokens of transformers' `generate`."""

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.infra.stack import running_demo_stack
from tests.tiny_vision import file_of, greedy_tokens, picture, save_tiny_vision_model
from tests.vllm_environment import vllm_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.campaign, pytest.mark.timeout(600)]

SIZE = (120, 70)
PROMPT = "user: What is <image> it?"


def test_chats_and_responses_see_the_callers_image(tmp_path: Path) -> None:
    """As a data URL and as a file; a response counts its tokens as a chat."""
    arguments = vllm_arguments()  # skips where vLLM is not installed
    folder = save_tiny_vision_model(tmp_path)
    image = picture(SIZE, 3)
    data = file_of(image)
    expected = greedy_tokens(folder, PROMPT, [image], 16)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    with (
        running_demo_stack(f"--model={folder}", "--served-model-name=sees", *arguments) as stack,
        httpx.Client(base_url=stack.url, timeout=120) as http,
    ):
        [model] = http.get("/v1/models").json()["data"]
        assert model["capabilities"]["images"]
        sent = http.post("/v1/files", files={"file": ("a.png", data)}, data={"purpose": "vision"})
        for source in ({"url": url}, {"file_id": sent.json()["id"]}):
            answer = http.post("/v1/chat/completions", json=chat(source)).json()
            assert answer["choices"][0]["token_ids"] == expected, answer
            # The text, 2 × 3 tiles, and the whole image.
            assert answer["usage"]["prompt_tokens"] == 19 + 7 + 2 + 6 * 6
        item = {"type": "input_image", "image_url": url}
        content = [text("What is "), item, text(" it?")]
        asked = {"model": "sees", "temperature": 0, "max_output_tokens": 16}
        response = http.post(
            "/v1/responses", json=asked | {"input": [{"role": "user", "content": content}]}
        ).json()
        assert response["status"] in ("completed", "incomplete"), response
        assert response["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]


def chat(source: dict[str, str]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": source},
        {"type": "text", "text": " it?"},
    ]
    return {
        "model": "sees",
        "temperature": 0,
        "max_tokens": 16,
        "return_token_ids": True,
        "messages": [{"role": "user", "content": content}],
    }


def text(value: str) -> dict[str, str]:
    return {"type": "input_text", "text": value}
