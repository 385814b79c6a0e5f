"""Arguments that are each enclosed in tags. Strings are written without quotes."""

from collections.abc import Mapping
from typing import Any

from gateway.grammars.rules.arguments import (
    OF_CHOICES,
    OF_TEXTS,
    Arguments,
    Path,
    choices_of,
    says_nothing,
    times,
)
from gateway.grammars.rules.lark import Lark, either, json_rule, quoted
from gateway.grammars.rules.parameter_types import Schema, is_string, resolved

_STRING_TYPES = ("string", "true")
_OTHER_TYPES = ("number", "integer", "boolean", "null", "array", "object", "false")


class TagArguments(Arguments):
    """Arguments of the form (key_open KEY key_close VALUE value_close)*."""

    def __init__(
        self, lark: Lark, name: str, schema: Schema, is_strict: bool, format_: Mapping[str, Any]
    ) -> None:
        super().__init__(lark, name, schema, is_strict)
        self._format = format_

    def whole(self) -> str:
        schema = self.parameters()
        if self.takes_any(schema):
            name = self.lark.rule("KEY", r"/[^<>\n\"]{1,256}/")
            return f"({self._argument(name, True, ())})*"
        items = [
            (self._argument(quoted(name), each, ("properties", name)), is_required)
            for name, each, is_required in self.properties(schema)
        ]
        return self.sequence(items, "")

    def _argument(self, name: str, schema: Any, path: Path) -> str:
        literal, format_ = self.lark.literal, self._format
        value = resolved(schema, self.root)
        is_text = is_string(value) or says_nothing(value)
        types = _STRING_TYPES if is_text else _OTHER_TYPES
        key = f"{literal(format_['key_open'])} {name} {literal(format_['key_close'], types)}"
        close = format_["value_close"]
        if is_text:
            return f"{key} {self._text(value if isinstance(value, dict) else {}, close, path)}"
        defined = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        whole = json_rule({**defined, **schema}, self.is_strict)
        return f"{key} {whole} {literal(close)}"

    def _text(self, schema: Schema, close: str, path: Path) -> str:
        if (choices := choices_of(schema)) is not None:
            self.check(schema, OF_CHOICES, path)
            texts = [quoted(each) for each in choices if isinstance(each, str)]
            return f"{either(*texts)} {self.lark.literal(close)}"
        self.check(schema, OF_TEXTS, path)
        return self.raw(f"/(?s:.){times(schema)}/", close)
