"""Which of its targets a route chooses. Knows no jobs; a classifier is asked elsewhere."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from contract.flows import Condition, Route, Target

MAX_TEXT_CHARS = 16_384  # of the text, from its start, that a pattern sees
MAX_LANGUAGE_CHARS = 2_000  # of the text, from its start; more costs time and decides nothing
# The detector's languages without a code in ISO 639-1 that are part of one with a code.
_MACRO_LANGUAGES = {"ary": "ar", "arz": "ar", "uzs": "uz", "wuu": "zh", "yue": "zh"}


@dataclass(frozen=True)
class Facts:
    """What rules may ask of a call. `text` is its last prompt or user's message. `label` is that of
    the route's classifier; None if it was not asked, or did not answer."""

    num_prompt_tokens: int
    text: str
    tenant: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None

    @cached_property
    def language(self) -> str:
        """The text's ISO 639-1 code, if its language has one. A guess if the text is short."""
        code: str = _detector().classify(self.text[:MAX_LANGUAGE_CHARS])[0]
        return _MACRO_LANGUAGES.get(code, code)


def choose_target(route: Route, facts: Facts, draw: float) -> str:
    """Returns the model for a call. `draw`: random, from 0 up to but not including 1."""
    for rule in route.rules:
        labels = rule.when.labels
        if _holds(rule.when, facts) and (not labels or facts.label in labels):
            return _draw(rule.to, draw)
    return _draw(route.otherwise, draw)


def needs_label(route: Route, facts: Facts) -> bool:
    """Whether the choice depends on the classifier, which has not been asked yet."""
    if facts.label is None:
        for rule in route.rules:
            if _holds(rule.when, facts):
                return bool(rule.when.labels)
    return False


def check_pattern(pattern: str) -> None:
    """Raises ValueError if it cannot be compiled."""
    try:
        _pattern(pattern)
    except SchemaError as exc:
        reason = str(exc).rpartition("error: ")[2].strip()
        raise ValueError(f"is no regular expression that can be used: {reason}") from exc


def check_languages(codes: Iterable[str]) -> None:
    """Loads the detector. Raises ValueError if it is not installed, or does not know a code."""
    try:
        known = {code for code in load_detector() if len(code) == 2}
    except ModuleNotFoundError as exc:
        raise ValueError("needs py3langid: install batchway[languages]") from exc
    if unknown := [code for code in codes if code not in known]:
        raise ValueError(f"unknown language {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _holds(when: Condition, facts: Facts) -> bool:
    """Whether a condition holds, apart from the label. Cheap questions come first."""
    text = facts.text[:MAX_TEXT_CHARS]
    return (
        when.min_prompt_tokens <= facts.num_prompt_tokens
        and (when.max_prompt_tokens is None or facts.num_prompt_tokens <= when.max_prompt_tokens)
        and (not when.tenants or facts.tenant in when.tenants)
        and all(facts.metadata.get(key) == value for key, value in when.metadata.items())
        and (not when.pattern or _pattern(when.pattern).isinstance_python(text))
        and (not when.languages or facts.language in when.languages)
    )


def _draw(targets: Sequence[Target], draw: float) -> str:
    point = draw * sum(target.weight for target in targets)
    for target in targets:
        point -= target.weight
        if point < 0:
            return target.model
    return targets[-1].model  # rounding


@lru_cache(maxsize=256)
def _pattern(pattern: str) -> SchemaValidator:
    """Compiles a pattern with Rust's regular expressions (through pydantic). Their time is linear
    in the text, so no caller's text can stop the gateway."""
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


@cache
def load_detector() -> tuple[str, ...]:
    """Returns the languages that the detector knows. The first call takes a second and 120 MB.
    Raises ModuleNotFoundError if it is not installed."""
    return tuple(code for code, _ in _detector().rank(""))


def _detector() -> Any:
    return importlib.import_module("py3langid")
