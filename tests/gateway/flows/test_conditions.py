"""Which target a route chooses, by rules, weights and a classifier's label."""

import threading
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.flows import Condition, Route, Rule, Target
from contract.function_types import Submission
from gateway.http.errors import ApiError
from gateway.prepare import flow_calls as entry
from gateway.prepare.conditions import (
    MAX_TEXT_CHARS,
    Facts,
    check_languages,
    choose_target,
    needs_label,
)
from gateway.prepare.schemas import ChatBody

FACTS = Facts(
    num_prompt_tokens=20, text="Where is my invoice?", tenant="acme", metadata={"tier": "gold"}
)


def route(*conditions: Condition, **fields: Any) -> Route:
    """Each condition leads to the model of its number, otherwise to `rest`."""
    rules = tuple(
        Rule(when=when, to=(Target(model=str(index)),)) for index, when in enumerate(conditions)
    )
    return Route(rules=rules, otherwise=(Target(model="rest"),), **fields)


def holds(facts: Facts, **condition: Any) -> bool:
    return choose_target(route(Condition(**condition)), facts, 0.0) == "0"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({}, True),
        ({"min_prompt_tokens": 20}, True),
        ({"min_prompt_tokens": 21}, False),
        ({"max_prompt_tokens": 20}, True),
        ({"max_prompt_tokens": 19}, False),
        ({"tenants": ("other", "acme")}, True),
        ({"tenants": ("other",)}, False),
        ({"pattern": "(?i)INVOICE|rechnung"}, True),
        ({"pattern": "^invoice"}, False),
        ({"metadata": {"tier": "gold"}}, True),
        ({"metadata": {"tier": "gold", "region": "eu"}}, False),
        ({"languages": ("de", "en")}, True),
        ({"languages": ("de",)}, False),
        ({"labels": ("ask",)}, False),  # nobody asked for one
        ({"min_prompt_tokens": 1, "tenants": ("acme",), "pattern": "^Where"}, True),
        ({"min_prompt_tokens": 1, "tenants": ("other",)}, False),
    ],
)
def test_a_rule_holds_where_all_that_it_names_holds(
    condition: dict[str, Any], expected: bool
) -> None:
    """What it does not name does not matter."""
    assert holds(FACTS, **condition) == expected


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Wo ist meine Rechnung? Ich habe sie nicht bekommen.", "de"),
        ("¿Dónde está la biblioteca más cercana?", "es"),
        ("図書館はどこにありますか。教えてください。", "ja"),
        ("今天天气很好，我们去公园吧。", "zh"),
    ],
)
def test_a_sentence_is_known_by_its_language(text: str, language: str) -> None:
    """By ISO 639-1."""
    assert Facts(num_prompt_tokens=1, text=text, tenant="t").language == language


def test_codes_of_languages_are_checked() -> None:
    """A three-letter code would never hold."""
    check_languages(["de", "zh"])
    with pytest.raises(ValueError, match="unknown language 'deu'; known are af, "):
        check_languages(["deu"])


def test_a_pattern_sees_a_bounded_text_in_linear_time() -> None:
    """A text on which other engines backtrack for years takes milliseconds of a processor."""
    text = "a" * MAX_TEXT_CHARS
    started_s = time.thread_time()
    facts = call_with(text + "b")
    assert holds(facts, pattern="^(a+)+$")
    assert not holds(facts, pattern="^(a+)+b$")
    assert time.thread_time() - started_s < 1


def call_with(text: str) -> Facts:
    return Facts(num_prompt_tokens=1, text=text, tenant="t")


def test_the_first_rule_that_holds_decides() -> None:
    """Later ones are not asked."""
    rules = route(Condition(tenants=("x",)), Condition(min_prompt_tokens=5), Condition())
    assert choose_target(rules, FACTS, 0.5) == "1"
    assert choose_target(route(Condition(tenants=("x",))), FACTS, 0.5) == "rest"


def test_a_classifier_is_asked_only_where_its_label_decides() -> None:
    """Not where an earlier rule holds without it, or the rest of the rule fails."""
    with_label = Condition(labels=("ask",), min_prompt_tokens=10)
    asked = route(with_label, Condition(tenants=("acme",)), classifier="intent")
    assert needs_label(asked, FACTS)
    assert not needs_label(asked, call_with("short"))
    assert not needs_label(route(Condition(), with_label, classifier="intent"), FACTS)


@pytest.mark.parametrize(("label", "model"), [("ask", "0"), ("chat", "1"), ("other", "rest")])
def test_a_label_chooses(label: str, model: str) -> None:
    """Once it is known, it is not asked for again."""
    rules = route(Condition(labels=("ask",)), Condition(labels=("chat",)), classifier="intent")
    labelled = Facts(num_prompt_tokens=1, text="", tenant="t", label=label)
    assert not needs_label(rules, labelled)
    assert choose_target(rules, labelled, 0.0) == model


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5))
def test_weights_share_the_calls(weights: list[float]) -> None:
    """Each target gets its weight's share of evenly spaced draws, to within one draw."""
    targets = tuple(Target(model=str(i), weight=weight) for i, weight in enumerate(weights))
    chosen = [choose_target(Route(otherwise=targets), FACTS, i / 1000) for i in range(1000)]
    for i, weight in enumerate(weights):
        assert abs(chosen.count(str(i)) - 1000 * weight / sum(weights)) <= 1 + 1e-6


def test_rules_cost_far_less_than_two_milliseconds() -> None:
    """Of a processor, with language and pattern, on a long text: the median of 100 choices."""
    rules = route(Condition(languages=("de",)), Condition(pattern="(?i)refund|cancel"))
    text = "Could you tell me how this works, please? " * 1000
    times_s = []
    for _ in range(100):
        facts = call_with(text)
        started_s = time.thread_time()
        assert choose_target(rules, facts, 0.0) == "rest"
        times_s.append(time.thread_time() - started_s)
    assert sorted(times_s)[50] < 0.002


def test_definitions_travel_in_cards() -> None:
    """A route is the same after msgpack."""
    rules = route(Condition(languages=("de",), metadata={"a": "b"}), classifier="intent")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rules), type=Route) == rules


@pytest.mark.anyio
async def test_a_gateway_that_cannot_detect_languages_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It loads them at the first call of a route by language, in a thread."""
    threads = []

    def missing() -> None:
        threads.append(threading.get_ident())
        raise ModuleNotFoundError("py3langid")

    monkeypatch.setattr(entry, "load_detector", missing)
    body = ChatBody.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "Guten Tag"}]}
    )
    asked_by = "t", Submission(max_output_tokens=1, deadline_s=1.0, retention_s=1.0)
    asked = [Condition(languages=("de",)), Condition(tenants=("t",))]
    with pytest.raises(ApiError) as refused:
        await entry.facts_of(None, route(*asked), body, *asked_by)  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.code) == (503, "languages_missing")
    assert threads != [threading.get_ident()]
    await entry.facts_of(None, route(asked[1]), body, *asked_by)  # type: ignore[arg-type]
