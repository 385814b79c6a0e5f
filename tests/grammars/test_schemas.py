"""Instances that grammars of JSON schemas accept."""

import json
from collections import Counter
from typing import Any

import pytest

from gateway.grammars.compiled import GrammarRefused, Kind, compile_grammar
from tests.fakes import encode_text, hash_grammars
from tests.grammars.corpus import suite
from workers.engine.grammar import GrammarFailed, Matcher

pytestmark = pytest.mark.campaign


def test_invalid_instances_of_the_published_suite_are_rejected() -> None:
    """JSON-Schema-Test-Suite, draft 2020-12. Exceptions: details of dates and host names that
    validators check optionally, and U+FEFF as white space."""
    counts: Counter[str] = Counter()
    wrong = []
    for group, tests in suite():
        if not group.name.startswith("draft2020-12/"):
            continue
        for case in tests:
            name = f"{group.name.removeprefix('draft2020-12/')}: {case['description']}"
            try:
                grammar = compile_grammar(Kind.JSON_SCHEMA, group.schema)
            except GrammarRefused:
                counts["refused"] += 1
                continue
            accepts = does_accept(hash_grammars().matcher(grammar), case["data"])
            if accepts and not case["valid"]:
                wrong.append(name)
            counts[f"{'accepted' if accepts else 'not accepted'}, {case['valid']}"] += 1
    print(dict(counts))
    assert {name.split(":")[0] for name in wrong} <= {
        "optional/ecmascript-regex",
        "uniqueItems",  # which nothing enforces
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
