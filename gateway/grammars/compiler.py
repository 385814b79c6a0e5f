"""Compiles what constrains outputs, in processes of their own."""

import copy
import json
from collections.abc import Mapping
from typing import Any, Self

from cachetools import LRUCache

from gateway.child import Refused
from gateway.child_process import ChildFailed, ChildLimits, ChildPool, ChildUnreadable
from gateway.http.errors import invalid_value

_NUM_KEPT = 256  # compiled grammars, of at most 128 KiB each


class Constraint:
    """A parameter that constrains the output, not yet compiled."""

    def __init__(self, param: str, kind: str, value: Any, is_strict: bool = False) -> None:
        self.param = param
        self.request: Mapping[str, Any] = {"kind": kind, "value": value, "is_strict": is_strict}

    def within(self, around: Mapping[str, Any]) -> Self:
        """Returns the same constraint for an answer with something around it: a grammars.Around."""
        found = copy.copy(self)
        found.request = {**self.request, "around": around}
        return found


class GrammarCompiler:
    """Compiles constraints in processes of their own, and caches the results and the refusals."""

    def __init__(self, limits: ChildLimits | None = None) -> None:
        limits = limits or ChildLimits(cpu_s=1)
        self._processes = ChildPool("gateway.grammars.compiled", {}, limits)
        self._compiled: LRUCache[str, str] = LRUCache(_NUM_KEPT)
        self._refused: LRUCache[str, str] = LRUCache(_NUM_KEPT)

    async def compile(self, constraint: Constraint) -> str:
        """The compiled grammar. Raises ApiError, Busy."""
        key, param = json.dumps(constraint.request), constraint.param
        if (grammar := self._compiled.get(key)) is not None:
            return grammar
        try:
            if (reason := self._refused.get(key)) is not None:
                raise Refused(reason)
            self._compiled[key] = grammar = await self._processes.ask(constraint.request)
        except Refused as refused:
            self._refused[key] = str(refused)
            path, message = json.loads(str(refused))
            param = f"{param}.{path}" if path else param
            raise invalid_value(param, f"{param}: {message}") from None
        except ChildFailed as failure:
            raise invalid_value(param, f"{param} cannot be compiled: {failure}") from None
        except ChildUnreadable:
            raise RuntimeError("llguidance cannot be loaded") from None
        return grammar

    async def aclose(self) -> None:
        await self._processes.aclose()
