"""Token ids to text: no text is lost, and no text after a stop string is shown."""

import os.path
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from contract.jobs import SamplingParams
from tests.fakes import EOS_ID, PAD_ID, encode_text, hash_tokenizer, output_text
from workers.output.stop_strings import Automaton
from workers.supervisor.held_job import ChoiceText

tokenizer = Tokenizer.from_str(hash_tokenizer().tokenizer_json)


def text_of(
    token_ids: Sequence[int],
    *stop: str,
    hidden_ids: Collection[int] | None = None,
    tokenizer: Tokenizer = tokenizer,
    **params: Any,
) -> ChoiceText:
    """The text of a choice after a prompt."""
    asked = SamplingParams(max_tokens=99, seed=0, stop=stop, **params)
    return ChoiceText(tokenizer, token_ids, asked, hidden_ids)


def run(text: str | bytes, *stop: str, min_tokens: int = 0) -> tuple[str, list[str], bool]:
    """The complete released text, its pieces, and whether a stop string was found."""
    token_ids = list(text) if isinstance(text, bytes) else encode_text(text)
    choice = text_of((65,), *stop, min_tokens=min_tokens)
    pieces: list[str] = []
    for token_id in token_ids:
        pieces.append(choice.push(token_id))
        if choice.stops.found:
            return "".join(pieces), pieces, True
    pieces.append(choice.flush())
    return "".join(pieces), pieces, False


@given(st.text(max_size=60))
def test_all_text_is_released_whole(text: str) -> None:
    """Any Unicode text is unchanged, and no piece ends inside a character."""
    whole, pieces, stopped = run(text)
    assert (whole, stopped) == (text, False)
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=60))
def test_invalid_utf_8_does_not_affect_the_text_around_it(raw: bytes) -> None:
    """It is shown as replacement characters."""
    assert run(raw)[0] == raw.decode(errors="replace")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=9))
def test_a_stop_string_is_found_at_its_first_place_and_never_shown(
    text: str, stop: list[str]
) -> None:
    """Compared with a search that sees one more character at a time."""
    expected, found = text, False
    for end in range(1, len(text) + 1):
        starts = [i for s in stop if (i := text[:end].find(s)) >= 0]
        if starts:
            expected, found = text[: min(starts)], True
            break
    whole, pieces, stopped = run(text, *stop)
    assert (whole, stopped) == (expected, found)
    assert all(expected.startswith("".join(pieces[:n])) for n in range(len(pieces)))


def test_the_stop_string_that_ends_a_choice_is_named() -> None:
    """The one at the first place."""
    choice = text_of((65,), "bcd", "ab")
    assert "".join(map(choice.push, encode_text("xab"))) == "x"
    assert choice.stops.found == "ab"


def test_a_stop_that_is_shown_ends_the_text() -> None:
    """Whole, and nothing is held back for it."""
    choice = text_of((), "bc", include_stop_str_in_output=True)
    assert [choice.push(token_id) for token_id in b"abc"] == ["a", "b", "c"]
    assert choice.stops.found


@pytest.mark.parametrize("joins", [False, True])
def test_added_tokens_are_joined_where_no_spaces_are_wanted(joins: bool) -> None:
    """As vLLM does: a tokenizer that shows a space before each token shows none between them."""
    plain = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    plain.add_special_tokens(["<x>", "<y>"])
    ids = [0, 2, 3, 1]
    asked: dict[str, Any] = {
        "skip_special_tokens": False,
        "spaces_between_special_tokens": not joins,
    }
    choice = text_of((), tokenizer=plain, **asked)
    text = "".join(map(choice.push, ids)) + choice.flush()
    assert text == ("a <x><y> b" if joins else plain.decode(ids, skip_special_tokens=False))


def test_the_steps_of_a_search_are_linear_in_the_text_however_many_stops_there_are() -> None:
    """Also where each character ends what thousands of them begin with: a step back undoes one
    forward."""
    stops = Automaton(tuple("a" * num + end for num in range(1, 120) for end in "bc"))
    num_steps, state = 0, 0
    for char in ("a" * 300 + "d") * 5:
        before, state = state, stops.after(state, char)
        num_steps += 1 + max(0, stops.num_begun[before] + 1 - stops.num_begun[state])
    assert num_steps <= 2 * 301 * 5


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    """Everything else is released at once."""
    _, pieces, _ = run("abcabd", "abd")
    assert pieces == ["", "", "abc", "", "", ""]


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    """As stop tokens are."""
    assert run("aXbXc", "X", min_tokens=2) == ("aXb", ["a", "X", "b", ""], True)


@pytest.mark.parametrize("cut", range(7))
def test_a_replay_reaches_the_same_state(cut: int) -> None:
    """Released text depends only on the tokens: a second decoder agrees after every token."""
    token_ids = encode_text("ab→cX")
    first, second = (text_of((), "cXY") for _ in range(2))
    for token_id in token_ids[:cut]:
        assert first.push(token_id) == second.push(token_id)
    assert first.flush() == second.flush()


PROMPTS = ["Count 3. \N{REPLACEMENT CHARACTER}", "x \ufffd\ufffdé🎉", "é", "", "a\ufffd"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("output", ["A", "東🎉x", "\ufffd q", " 3. \ufffd"])
def test_a_prompt_that_ends_anywhere_stays_out_of_the_output(prompt: str, output: str) -> None:
    """Cut at every byte: the output is what follows, with the character that it completes."""
    token_ids = encode_text(prompt + output)
    for cut in range(len(token_ids) + 1):
        choice = text_of(token_ids[:cut], "3.")
        pieces = []
        for token_id in token_ids[cut:]:
            pieces.append(choice.push(token_id))
            if choice.stops.found:
                break
        text = "".join(pieces) + ("" if choice.stops.found else choice.flush())
        before, after = output_text(token_ids[:cut]), prompt + output
        rest = after[len(os.path.commonprefix([before, after])) :]
        stop = rest.find("3.")
        assert text == (rest if stop < 0 else rest[:stop])


def test_hidden_tokens_have_no_text() -> None:
    """Nor has an ignored end-of-sequence token. Others that are special have."""
    ignored = text_of(())
    assert [ignored.push(i) for i in (97, EOS_ID, 98)] == ["a", "", "b"]
    assert ignored.flush() == ""
    choice = text_of((EOS_ID, 97), hidden_ids={EOS_ID})
    assert [choice.push(i) for i in (98, EOS_ID, PAD_ID, 99)] == ["b", "", "<pad>", "c"]
