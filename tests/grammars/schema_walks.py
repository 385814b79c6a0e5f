"""Draws outputs of schemas by the masks that an engine gets, and judges them by the `jsonschema`
package."""

import functools
import json
import random
import re
import string
from collections.abc import Callable, Collection
from decimal import Decimal, InvalidOperation, localcontext
from itertools import product
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import referencing.exceptions
from jsonschema.validators import validator_for  # type: ignore[import-untyped]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.grammars.compiled import GrammarRefused, Kind, compile_grammar
from tests.fakes import EOS_ID, hash_grammars, output_text
from tests.grammars.corpus import Case
from workers.engine.grammar import Grammars

MAX_TOKENS = 600
_ENDING = '"}],'


class Walker:
    """Walks over the masks of one tokenizer."""

    def __init__(
        self,
        grammars: Grammars,
        decode: Callable[[list[int]], str],
        eos_id: int,
        ending_ids: Collection[int],
    ) -> None:
        """`ending_ids`: tokens that lead to an end."""
        self._grammars = grammars
        self._decode = decode
        self._eos_id = eos_id
        self._ending_ids = {eos_id, *ending_ids}

    def draw(self, grammar: str, random_: random.Random) -> str | None:
        """A whole output, of which tokens that lead to an end are preferred; None if it gets too
        long. Raises GrammarFailed."""
        matcher = self._grammars.matcher(grammar)
        token_ids: list[int] = []
        while not matcher.is_complete and len(token_ids) < MAX_TOKENS:
            following = matcher.forced()
            if not following:
                [forbidden] = self._grammars.forbidden([matcher])
                following = [self._choose(np.flatnonzero(~forbidden).tolist(), random_)]
            for token_id in following:
                matcher.consume(token_id)
                if token_id == self._eos_id:
                    return self._decode(token_ids)
                token_ids.append(token_id)
        return self._decode(token_ids) if matcher.is_complete else None

    def _choose(self, allowed: list[int], random_: random.Random) -> int:
        ending = [token_id for token_id in allowed if token_id in self._ending_ids]
        return random_.choice(ending if ending and random_.random() < 0.7 else allowed or [-1])


@functools.cache
def walkers() -> list[Walker]:
    """With a token for each byte, and with tokens of several characters beside these."""
    tokenizer = _of_pieces()
    vocab_size = tokenizer.get_vocab_size()
    grammars = Grammars(tokenizer.to_str(), vocab_size, [vocab_size - 1])
    found = [tokenizer.token_to_id(each) for each in _ENDING]
    ending_ids = [token_id for token_id in found if token_id is not None]
    return [
        Walker(hash_grammars(), output_text, EOS_ID, _ENDING.encode()),
        Walker(grammars, tokenizer.decode, vocab_size - 1, ending_ids),
    ]


def _of_pieces() -> Tokenizer:
    """A byte-level tokenizer whose tokens cross the borders of JSON's parts."""
    marks, letters = [*'"{}[],:', "Ġ", "\\"], string.ascii_lowercase
    pieces = ["".join(each) for num in (2, 3) for each in product(marks, repeat=num)]
    pieces += [a + b for a in (*marks, *letters) for b in letters] + [c + '"' for c in letters]
    pieces += [str(number) for number in range(10, 1_000)] + ["true", "null", '":Ġ"', '",Ġ"']
    words = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces, "<end>"])
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def is_valid(output: str, schema: Any) -> bool | None:
    """By the draft that the schema names, or the newest; None: the validator cannot tell. Numbers
    are as they are written, and uniqueItems is left aside, which nothing enforces. Bounds may have
    the form of draft 4, and `nullable` counts, as in OpenAPI 3.0."""
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    given = json.loads(json.dumps(schema), parse_float=_exact, object_hook=_modern)
    value = json.loads(output, parse_float=_exact)
    with localcontext(prec=2_000):
        try:
            return bool(validator(given).is_valid(value))
        except (AttributeError, RecursionError, re.error, referencing.exceptions.Unresolvable):
            return None  # for lists as `items`, ECMA's expressions, other documents


def _exact(number: str) -> Decimal | float:
    try:
        return Decimal(number)
    except InvalidOperation:  # the exponent is endless
        return float(number)


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    for bound in ("minimum", "maximum"):
        name = f"exclusive{bound.capitalize()}"
        if isinstance(excludes := schema.get(name), bool):
            del schema[name]
            if excludes and bound in schema:
                schema[name] = schema[bound]
    if isinstance(schema.get("uniqueItems"), bool):
        del schema["uniqueItems"]
    return {"anyOf": [schema, {"type": "null"}]} if schema.get("nullable") is True else schema


def outcome(case: Case, is_strict: bool, walker: Walker, num_walks: int = 2) -> str:
    """What becomes of a schema: `refused`, for a reason, or `ended` after valid outputs. Some are
    `long`, and of one that is not strict an output may be `other` than the schema says. Raises
    AssertionError or GrammarFailed."""
    schema = case.schema
    if case.draft and isinstance(schema, dict):
        schema = {"$schema": case.draft, **schema}
    grammar, refusal = "", None
    try:
        grammar = compile_grammar(Kind.JSON_SCHEMA, schema, is_strict)
    except GrammarRefused as exc:
        refusal = exc
    if refusal is not None:
        assert str(refusal), "it has a reason"
        assert not refusal.path or _leads_somewhere(schema, ".".join(refusal.path))
        return "refused"
    found = "ended"
    for number in range(num_walks):
        output = walker.draw(grammar, random.Random(f"{case.name} {number}"))
        valid = None if output is None else is_valid(output, schema)
        if valid is None:
            found = "long" if output is None else "unjudged"
        elif not valid:
            assert not is_strict, f"{case.name}: {output}"
            found = "other"
    return found


def _leads_somewhere(schema: Any, path: str) -> bool:
    """Names may contain dots."""
    if not path or not isinstance(schema, dict | list):
        return not path
    keys = range(len(schema)) if isinstance(schema, list) else schema
    return any(
        _leads_somewhere(schema[key], path[len(str(key)) + 1 :])
        for key in keys
        if f"{path}.".startswith(f"{key}.")
    )
