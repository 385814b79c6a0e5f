"""Options of vLLM that choose tokens, and how they are shown."""

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from contract.model_cards import TokenizerFiles
from gateway.models.tokens import ModelTokenizer
from gateway.prepare.generation import bad_word_ids
from gateway.prepare.schemas import CompletionBody
from infra.demo_model import demo_model_path
from tests.fakes import EOS_ID
from tests.gateway.conftest import error_of
from tests.gateway.fake_worker import MODEL, FakeWorker, says
from workers.model.tokenizer import read_tokenizer

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}


async def test_options_reach_the_job(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """The defaults are those of vLLM."""
    given = {
        "allowed_token_ids": [66, 65, 66],
        "bad_words": ["ab"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        for fields in (given, {}):
            assert (await http.post(path, json=body | fields)).status_code == 200
    for job in worker.seen:
        params, is_given = job.params, bool(job.params.bad_words)
        assert params.allowed_token_ids == ((66, 65) if is_given else ())
        assert params.bad_words == (((97, 98),) if is_given else ())
        assert params.include_stop_str_in_output == is_given
        assert params.skip_special_tokens != is_given
        assert params.spaces_between_special_tokens != is_given
    assert len(worker.seen) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [259]}, "allowed_token_ids"),
        ({"allowed_token_ids": [65] * 1_025}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [65], "guided_regex": "a"}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": ["a", " "]}, "bad_words.1"),
        ({"bad_words": ["a"] * 65}, "bad_words"),
        ({"bad_words": ["a" * 250] * 5}, "bad_words"),
    ],
)
async def test_what_cannot_hold_is_refused(
    idle_worker: FakeWorker, http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    """By name, before a job is made of it."""
    answer = await http.post("/v1/completions", json=COMPLETION | fields)
    assert error_of(answer) == (400, param, "invalid_value")


def test_bad_words_are_tokenized_as_by_vllm() -> None:
    """`SamplingParams.update_from_tokenizer`: at the start of a text, and behind a space where that
    is another token."""
    words = ("the", "cat", "a")
    model = WordLevel(
        {
            f"{space}{word}": 3 * number + place
            for number, space in enumerate(("", "\u2581"))
            for place, word in enumerate(words)
        },
        unk_token="a",
    )
    plain = Tokenizer(model)
    plain.pre_tokenizer = Metaspace(prepend_scheme="never")
    tokenizer = ModelTokenizer(
        "m", TokenizerFiles(tokenizer_json=plain.to_str(), chat_template=None)
    )
    reference: Any = PreTrainedTokenizerFast(tokenizer_object=plain)  # type: ignore[no-untyped-call]
    given = ["the", " cat", "the cat", "a"]
    expected: list[tuple[int, ...]] = []
    for word in given:
        for prefix in ("", " "):
            ids = tuple(reference.encode(prefix + word.lstrip(), add_special_tokens=False))
            last = expected[-1] if prefix else ()
            if not prefix or (ids[0] != last[0] and len(ids) == len(last)):
                expected.append(ids)
    body = CompletionBody.model_validate(COMPLETION | {"bad_words": given})
    assert bad_word_ids(tokenizer, body) == tuple(expected)
    assert expected == [(0,), (3,), (1,), (4,), (0, 4), (3, 4), (2,), (5,)]


async def test_tokens_are_shown_by_their_ids(worker: FakeWorker, http: httpx.AsyncClient) -> None:
    """In log probabilities of both formats, streams have the same."""
    worker.script = says("é")
    as_ids = {"return_tokens_as_token_ids": True}
    answer = await http.post("/v1/completions", json=COMPLETION | as_ids | {"logprobs": 1})
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["token_id:195", "token_id:169"]
    assert logprobs["text_offset"][:2] == [0, 0]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    body = CHAT | as_ids | {"logprobs": True, "top_logprobs": 1}
    answer = await http.post("/v1/chat/completions", json=body)
    first = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "token_id:195"
    assert bytes(first["bytes"]) == b"token_id:195"
    assert first["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_count_special_tokens_that_are_shown(skips: bool) -> None:
    """As the text has them."""
    path = str(demo_model_path())
    tokenizer = ModelTokenizer("demo", read_tokenizer(path))
    stream = tokenizer.text_stream(skips_special=skips)
    reference = AutoTokenizer.from_pretrained(path)
    ids = [*reference.encode("Once upon"), reference.eos_token_id, *reference.encode(" a")]
    text = "".join(stream.push(token_id)[1] for token_id in ids) + stream.end()
    assert text == reference.decode(ids, skip_special_tokens=skips)
