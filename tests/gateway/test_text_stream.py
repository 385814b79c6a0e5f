"""The gateway decodes token by token, as workers do, from wherever the prompt ends."""

import os.path

import pytest
from tokenizers import Tokenizer

from gateway.models.tokens import TextStream
from tests.fakes import encode_text, hash_tokenizer, output_text

tokenizer = Tokenizer.from_str(hash_tokenizer().tokenizer_json)


@pytest.mark.parametrize("prompt", ["Count 3. \N{REPLACEMENT CHARACTER}", "x é🎉", "é", ""])
@pytest.mark.parametrize("output", ["A", "東🎉x", "\ufffd q"])
def test_a_prompt_that_ends_anywhere_stays_out_of_the_stream(prompt: str, output: str) -> None:
    """Cut at every byte; offsets count the characters that came before."""
    token_ids = encode_text(prompt + output)
    for cut in range(len(token_ids) + 1):
        stream = TextStream(tokenizer, token_ids[:cut], offset=7)
        pushed = [stream.push(token_id) for token_id in token_ids[cut:]]
        before, after = output_text(token_ids[:cut]), prompt + output
        rest = after[len(os.path.commonprefix([before, after])) :]
        assert "".join(piece for _, piece in pushed) + stream.end() == rest
        seen = ""
        for offset, piece in pushed:
            assert offset == 7 + len(seen)
            seen += piece
