"""Outputs that grammars of JSON schemas accept, judged by the `jsonschema` package."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from jsonschema.validators import validator_for  # type: ignore[import-untyped]

from gateway.openai.grammars import GrammarRefused, Kind, compile_grammar
from tests.fakes import EOS_ID, encode_text, hash_grammars, output_text
from workers.engine.grammar import GrammarFailed, Matcher

pytestmark = pytest.mark.campaign

DATA = Path(__file__).parent / "data"
MAX_TOKENS = 3_000


def read(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def matcher_of(schema: Any) -> Matcher:
    """Raises GrammarRefused."""
    return hash_grammars().matcher(compile_grammar(Kind.JSON_SCHEMA, schema))


def draw_output(matcher: Matcher, random_: random.Random) -> str | None:
    """Draws an output that the grammar accepts. Prefers tokens that lead to an end; returns None
    if the output gets too long."""
    ends = {EOS_ID, *b'"}],0123456789'}
    token_ids: list[int] = []
    while not matcher.is_complete and len(token_ids) < MAX_TOKENS:
        following = matcher.forced()
        if not following:
            [forbidden] = hash_grammars().forbidden([matcher])
            allowed = [i for i, is_forbidden in enumerate(forbidden) if not is_forbidden]
            ending = [token_id for token_id in allowed if token_id in ends]
            following = [random_.choice(ending if ending and random_.random() < 0.7 else allowed)]
        for token_id in following:
            matcher.consume(token_id)
            token_ids.append(token_id)
        if token_ids[-1] == EOS_ID:
            return output_text(token_ids[:-1])
    return output_text(token_ids) if matcher.is_complete else None


def is_valid(value: Any, schema: Any) -> bool:
    """By the draft that the schema names, or the newest."""
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(validator(schema).is_valid(value))


def test_outputs_of_published_schemas_are_valid() -> None:
    """JSONSchemaBench: accepted schemas yield only valid outputs, and rejections have a reason."""
    schemas = read("jsonschemabench.json.gz")
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    wrong = []
    for name, schema in schemas.items():
        random_ = random.Random(name)
        try:
            matcher = matcher_of(schema)
        except GrammarRefused as refusal:
            reasons[str(refusal).split(":")[0]] += 1
            counts["refused"] += 1
            continue
        try:
            output = draw_output(matcher, random_)
        except GrammarFailed:
            counts["failed"] += 1
            continue
        if output is None:
            counts["too long"] += 1
            continue
        counts["valid"] += 1
        if not is_valid(json.loads(output), schema):
            wrong.append(name)

    print(dict(counts), dict(reasons))
    assert wrong == []
    assert "" not in reasons
    assert counts["valid"] > 0.6 * len(schemas), counts
    assert counts["failed"] == 0


def test_invalid_instances_of_the_published_suite_are_rejected() -> None:
    """JSON-Schema-Test-Suite, draft 2020-12. Exceptions: details of dates and host names that
    validators check optionally, and U+FEFF as white space."""
    counts: Counter[str] = Counter()
    wrong = []
    for file, groups in read("json-schema-test-suite.json.gz").items():
        for group in groups:
            for case in group["tests"]:
                name = f"{file}: {group['description']}: {case['description']}"
                try:
                    matcher = matcher_of(group["schema"])
                except GrammarRefused:
                    counts["refused"] += 1
                    continue
                accepts = does_accept(matcher, case["data"])
                if accepts and not case["valid"]:
                    wrong.append(name)
                counts[f"{'accepted' if accepts else 'not accepted'}, {case['valid']}"] += 1
    print(dict(counts))
    assert {name.split(":")[0] for name in wrong} <= {
        "optional/ecmascript-regex",
        *(f"optional/format/{name}" for name in ("date", "date-time", "hostname", "time")),
    }


def does_accept(matcher: Matcher, value: Any) -> bool:
    """Whether the grammar accepts the instance, in the format of `json.dumps`, as a whole
    output."""
    for token_id in encode_text(json.dumps(value, ensure_ascii=False)):
        try:
            matcher.consume(token_id)
        except GrammarFailed:
            return False
    return matcher.state.is_accepting()
