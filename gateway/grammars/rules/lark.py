"""Writes Lark for llguidance: literals of a model's formats, and free text around them.

llguidance does not count an added token as text if it is special or looks like `<…>`; the same
characters as text are other tokens. So a literal that the tokenizer reads as an added token is
given by the token's id, and free text states where added tokens are allowed.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypedDict

KNOBS = "x-guidance"  # the library's own options inside a schema
ANY_TEXT = "/(?s:.*)/"
_PLACEHOLDERS = re.compile(r"(\{id\}|\{type\})")
# The beginning of a literal, up to white space or a character that also begins JSON or Python.
_WORD = re.compile(r"""\S[^\s{\["']*""")


class Marks(TypedDict):
    """A tokenizer's added tokens that a grammar needs."""

    ids: Mapping[str, int]  # of those that the formats' literals contain
    added: Sequence[Sequence[int]]  # ranges of all ids: first, last
    ends: Sequence[int]  # the ids that end an output


class Lark:
    """The rules of one grammar. Terminals have names in capitals."""

    def __init__(self, marks: Marks, id_length: int = 0) -> None:
        self._ids = marks["ids"]
        self._added = marks["added"]
        self.ends = marks["ends"]
        length = f"[A-Za-z0-9]{{{id_length}}}" if id_length else r"[A-Za-z0-9_:.\-]{1,64}"
        self._id = f"/{length}/"
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, str, str], str] = {}

    def __str__(self) -> str:
        # Forced text may be spelled like an added token. Where llguidance forces text, its masks
        # allow that token alone, which it then refuses.
        lines = ['%llguidance {"no_forcing": true}']
        return "\n".join([*lines, *(f"{head}: {body}" for head, body in self._rules.items())])

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule, and returns its name. Equal rules are added once."""
        assert self._rules.setdefault(name + options, body) == body, f"two rules named {name}"
        return name

    def new(self, prefix: str, body: str, options: str = "") -> str:
        """Adds a rule with this body, and returns its new name. Equal rules are added once."""
        known = self._names.setdefault((prefix, body, options), f"{prefix}_{len(self._names)}")
        return self.rule(known, body, options)

    def literal(self, text: str, types: Sequence[str] = ()) -> str:
        """A rule for a literal of a format. If it contains a token that may end the output, the
        grammar ends there. `types`: the values of its `{type}`."""
        any_type = f"({' | '.join(map(quoted, types))})"
        parts: list[str] = []
        for part in _PLACEHOLDERS.split(text):
            match part:
                case "{id}":
                    parts.append(self._id)
                case "{type}":
                    parts.append(any_type)
                case _:
                    for piece in filter(None, self._marks.split(part)):
                        token_id = self._ids.get(piece)
                        if token_id in self.ends:
                            return " ".join(parts)
                        parts.append(quoted(piece) if token_id is None else f"<[{token_id}]>")
        return " ".join(parts)

    def split(self, literal: str) -> tuple[str, str, str]:
        """Returns the text of a literal before its first added token, that token, and the rest."""
        text, *rest = self._marks.split(literal, maxsplit=1)
        return (text, rest[0], rest[1]) if rest else (text, "", "")

    def beginning(self, literal: str) -> str:
        """The part of a literal by which its begin is recognised: its first word, or the start of
        that up to an added token."""
        found = _WORD.match(literal)
        text, mark, _ = self.split(literal)
        word = found[0] if found else literal
        return text + mark if mark and len(text) <= len(word) else word

    @property
    def all_ids(self) -> list[int]:
        """The added tokens of all formats."""
        return sorted(self._ids.values())

    def ids_in(self, text: str) -> list[int]:
        """The added tokens in a text."""
        return sorted({self._ids[mark] for mark in self._marks.findall(text)})

    @property
    def text(self) -> str:
        """Any text, without added tokens."""
        return self.rule("TEXT", ANY_TEXT)

    def added(self, without: Collection[int] = ()) -> str:
        """A rule for any added token that does not end the output; "" if there is none."""
        ranges = ",".join(_ranges(self._added, {*without, *self.ends}))
        return f"<[{ranges}]>" if ranges else ""

    def anything(self, without: Collection[int] = ()) -> str:
        """A rule for text and added tokens, up to more text."""
        added = self.added(without)
        return f"({self.text} {added})*" if added else ""

    def up_to(self, name: str, literal: str, without: Collection[int] = ()) -> str:
        """A rule for anything up to the first occurrence of a literal, and the literal up to its
        first added token, if it has one. Other tokens may spell the literal, too."""
        text, mark, rest = self.split(literal)
        assert not rest
        spelled = self.rule(f"{name}_spelled", f"{self.text} {quoted(literal)}", "[lazy]")
        if not mark:
            return f"{self.anything(without)} {spelled}"
        own = self._ids[mark]
        before = self.rule(f"{name.upper()}_BEGUN", f"{ANY_TEXT} {quoted(text)}") if text else ""
        return f"{self.anything([own, *without])} ({spelled} | {before or self.text} <[{own}]>)"


def json_options(is_strict: bool) -> Any:
    """Options for JSON formatted as by `json.dumps`, so that names and separators are forced and
    white space is bounded. Unless `is_strict`, keywords that cannot be enforced are dropped."""
    return {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": not is_strict,
    }


def json_rule(schema: Mapping[str, Any], is_strict: bool, escapes: str | None = None) -> str:
    """A rule for JSON of a schema. `escapes`: letters that may follow a backslash in strings."""
    options: dict[str, Any] = json_options(is_strict)
    if escapes is not None:
        options["json_allowed_escapes"] = escapes
    return f"%json {json.dumps({**schema, KNOBS: options})}"


def quoted(text: str) -> str:
    """A literal of Lark for this text, in whatever tokens."""
    return json.dumps(text, ensure_ascii=False)


def maybe(text: str) -> str:
    """Makes a part optional."""
    return f"{quoted(text)}?" if text else ""


def either(*parts: str) -> str:
    """Joins those of the parts that are not empty as alternatives."""
    given = [part for part in parts if part]
    return given[0] if len(given) == 1 else f"({' | '.join(given)})"


def _ranges(ranges: Sequence[Sequence[int]], excluded: Collection[int]) -> Iterator[str]:
    """The ranges without some ids, in Lark's syntax."""
    for first, last in ranges:
        start = first
        for gap in sorted(each for each in excluded if first <= each <= last):
            if start < gap:
                yield f"{start}-{gap - 1}"
            start = gap + 1
        if start <= last:
            yield f"{start}-{last}"
