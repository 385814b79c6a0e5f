"""A model that says given texts through a real tokenizer, where masks allow.

A prompt chooses its text: its last `say:NAME` names a file in the folder `says` beside the model. A
token is a function of the prompt and the output so far, so a resumed answer goes on as it would
have. A mask, a forced token or a limit may lead the output away from the text; then the model goes
on at the next place in the text that fits.
"""

import contextlib
import json
import os
import re
import signal
import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from msgspec import to_builtins
from tokenizers import Tokenizer

from contract.jobs import SamplingParams
from workers.engine.interface import Chunk, Padding, PromptLogprobs, Row, Sample
from workers.engine.masks import StepMasks
from workers.engine.sequence import Sequence

SAYS = "says"
# `kill:K:FILE` in a prompt: after K output tokens the worker is killed, unless FILE exists.
_NAMED = re.compile(r"say:([0-9a-f]{8})")
_KILLS = re.compile(r"kill:(\d+):(\w+)")
_PARAMS = "PARAMS"  # in a text: the sampling parameters, as JSON
_LONGEST_TOKEN = 32  # bytes of a token that is tried as a part of the text
# What a model writes that has nothing more to say but may not end.
_CLOSERS = (b'"', b"}", b"]", b")", b"0", b"{", b"[", b"x")
_NUM_BLOCKS, _BLOCK_SIZE = 4096, 16


class Vocabulary:
    """The bytes of each token, and the first token of each text."""

    def __init__(self, tokenizer: Tokenizer, ending_id: int) -> None:
        self.tokenizer = tokenizer
        self.ending_id = ending_id
        added = tokenizer.get_added_tokens_decoder()
        is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])
        as_bytes = _byte_level_bytes if is_byte_level else _piece_bytes
        self.bytes_of = {
            token_id: as_bytes(piece) for piece, token_id in tokenizer.get_vocab(False).items()
        } | {token_id: token.content.encode() for token_id, token in added.items()}
        self.ids_of: dict[bytes, int] = {}
        for token_id in sorted(self.bytes_of):
            self.ids_of.setdefault(self.bytes_of[token_id], token_id)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _piece_bytes(piece: str) -> bytes:
    """Of a tokenizer whose pieces are text, with `▁` for spaces and `<0x0A>` for bytes."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _byte_level_bytes(piece: str) -> bytes:
    """Of a tokenizer whose pieces have GPT-2's printable character for each byte."""
    if not _BYTE_OF.keys() >= set(piece):
        return piece.encode()  # an added token that is in the vocabulary, too
    return bytes(_BYTE_OF[character] for character in piece)


def _gpt2_bytes() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _gpt2_bytes()


@dataclass
class Script:
    """A text, and the token that follows an output on the way to it."""

    text: str
    vocabulary: Vocabulary

    @cached_property
    def ids(self) -> list[int]:
        return [*self.vocabulary.encode(self.text), self.vocabulary.ending_id]

    @cached_property
    def data(self) -> bytes:
        return self.text.encode()

    def next_id(self, output_ids: Seq[int], forbidden: np.ndarray | None) -> int:
        """The likeliest token that is allowed."""
        num_output = len(output_ids)
        if num_output < len(self.ids) and self.ids[:num_output] == list(output_ids):
            likeliest = self.ids[num_output]
            if forbidden is None or not forbidden[likeliest]:
                return likeliest
        place = self._place_after(output_ids)
        if forbidden is None:
            return self._ids_at(place)[0] if place < len(self.data) else self.vocabulary.ending_id
        for start in range(place, len(self.data)):
            for token_id in self._ids_at(start):
                if not forbidden[token_id]:
                    return token_id
        ids_of = self.vocabulary.ids_of
        closers = [ids_of[text] for text in _CLOSERS if text in ids_of]
        for token_id in [self.vocabulary.ending_id, *closers]:
            if not forbidden[token_id]:
                return token_id
        return int(np.flatnonzero(~forbidden)[0])

    def _place_after(self, output_ids: Seq[int]) -> int:
        """Where in the text an output stands: behind the last of its tokens that was found."""
        place = 0
        for token_id in output_ids:
            piece = self.vocabulary.bytes_of.get(token_id, b"")
            if self.data.startswith(piece, place):
                place += len(piece)
            elif piece.strip() and (found := self.data.find(piece, place)) >= 0:
                place = found + len(piece)
        return place

    def _ids_at(self, start: int) -> list[int]:
        """The tokens that go on at a place: the tokenizer's own, then others, the longest first."""
        rest = self.data[start:]
        own: list[int] = []
        with contextlib.suppress(UnicodeDecodeError):  # inside of a character
            own = self.vocabulary.encode(rest.decode())[:1]
        if own and not rest.startswith(self.vocabulary.bytes_of.get(own[0], b"")):
            own = []  # a tokenizer that puts a space before a text
        pieces = (rest[:length] for length in range(min(len(rest), _LONGEST_TOKEN), 0, -1))
        return own + [
            self.vocabulary.ids_of[piece] for piece in pieces if piece in self.vocabulary.ids_of
        ]


class ScriptedModel:
    """A Model that keeps no KV."""

    num_blocks = _NUM_BLOCKS
    block_size = _BLOCK_SIZE
    shares_blocks = True
    num_state_slots = 0

    def __init__(
        self, folder: Path, vocabulary: Vocabulary, eos_token_ids: frozenset[int], max_len: int
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.max_model_len = min(max_len, _NUM_BLOCKS * _BLOCK_SIZE)
        self._folder = folder
        self._vocabulary = vocabulary
        self._told: weakref.WeakKeyDictionary[Sequence, _Told] = weakref.WeakKeyDictionary()

    def run(
        self, chunks: Seq[Chunk], padding: Seq[Padding] = (), masks: StepMasks | None = None
    ) -> list[Row]:
        del padding
        sequences = [chunk.sequence for chunk in chunks]
        rows, found = ([], np.empty(0)) if masks is None else masks.of(sequences)
        forbidden = dict(zip(rows, found, strict=True))
        return [self._row(chunk, forbidden.get(row)) for row, chunk in enumerate(chunks)]

    def _row(self, chunk: Chunk, forbidden: np.ndarray | None) -> Row:
        sequence, params = chunk.sequence, chunk.sequence.params
        prompt = _scored(chunk) if sequence.scores_prompt else None
        if not chunk.samples:
            return prompt
        told = self._told.get(sequence) or self._told.setdefault(sequence, self._read(sequence))
        told.kill(sequence.num_output)
        output_ids = sequence.token_ids[sequence.num_prompt :]
        token_id = told.script.next_id(output_ids, self._banned(sequence, forbidden))
        top = tuple((i, -float(rank + 1)) for rank, i in enumerate(range(params.logprobs or 0)))
        return Sample(token_id, -0.5, top, prompt)

    def _banned(self, sequence: Sequence, forbidden: np.ndarray | None) -> np.ndarray | None:
        """Also what parameters ban."""
        params = sequence.params
        banned = [i for i, bias in params.logit_bias.items() if bias <= -100]
        if sequence.num_output < params.min_tokens:
            banned += sequence.ending_ids
        if params.ignore_eos:
            banned += self.eos_token_ids
        if not banned:
            return forbidden
        size = max(self._vocabulary.bytes_of) + 1
        mask = np.zeros(size, dtype=bool) if forbidden is None else forbidden.copy()
        mask[banned] = True
        return mask

    def text_of(self, prompt: str, params: SamplingParams) -> str:
        """What it says to a prompt."""
        del params
        named = _NAMED.findall(prompt)
        return (self._folder / SAYS / named[-1]).read_text(encoding="utf-8") if named else "Hello."

    def _read(self, sequence: Sequence) -> "_Told":
        ids = sequence.token_ids[: sequence.num_prompt]
        prompt = self._vocabulary.tokenizer.decode(ids, skip_special_tokens=False)
        says, text = self._folder / SAYS, self.text_of(prompt, sequence.params)
        if _PARAMS in text:
            fields = to_builtins(sequence.params).items()
            shown = {name: value for name, value in fields if name not in ("grammar", "seed")}
            text = text.replace(_PARAMS, json.dumps(shown))
        kills = [(int(number), says / name) for number, name in _KILLS.findall(prompt)]
        return _Told(Script(text, self._vocabulary), kills)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a prompt tells the model to do."""

    script: Script
    kills: list[tuple[int, Path]]

    def kill(self, num_output: int) -> None:
        """Ends the worker, whose engine this is, as a power cut would."""
        for number, killed in self.kills:
            if num_output >= number and not killed.exists():
                killed.touch()
                os.kill(os.getppid(), signal.SIGKILL)


def _scored(chunk: Chunk) -> PromptLogprobs | None:
    end = min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt - 1)
    ids = chunk.sequence.token_ids[chunk.start + 1 : end + 1]
    return PromptLogprobs(chunk.start + 1, tuple(Sample(i, -0.5) for i in ids)) if ids else None
