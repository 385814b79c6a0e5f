"""The refusal of a grammar or schema, and the rule for dropping keywords."""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Path = tuple[str, ...]
FaultOf = Callable[[Schema], str]  # why a schema makes no grammar; "": it makes one


class GrammarRefused(Exception):
    """The grammar is rejected. The message is one sentence for the caller; `path` leads to the part
    of the schema."""

    def __init__(self, message: str, path: Path = ()) -> None:
        super().__init__(message)
        self.path = path


class Unenforceable(Exception):
    """No grammar enforces a keyword."""

    def __init__(self, keyword: str, reason: str = "") -> None:
        super().__init__(keyword, reason)
        self.keyword = keyword
        self.reason = reason


class Checks:
    """Tells the steps of the preparation what llguidance accepts and what may be dropped."""

    def __init__(self, fault_of: FaultOf, is_strict: bool) -> None:
        self.fault_of = fault_of
        self.is_strict = is_strict

    def drop(self, keyword: str, path: Path, reason: str = "") -> None:
        """Notes that a keyword is dropped. Raises GrammarRefused if the schema is strict."""
        if self.is_strict:
            why = f": {reason}" if reason else ""
            raise GrammarRefused(f"{keyword} cannot be enforced{why}", path)
