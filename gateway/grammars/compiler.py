"""Compiles what constrains outputs, in processes of their own."""

import copy
import json
import sys
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from contract.byte_cache import ByteCache
from gateway.child import Refused
from gateway.child_process import ChildFailed, ChildLimits, ChildPool, ChildUnreadable, encoded
from gateway.http.errors import invalid_value
from gateway.turns import current_owner

_MAX_KEPT_BYTES = 16 * 2**20  # of compiled grammars, at most 128 KiB each, and of refusals


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
        # Grammar and refusal, one of them empty.
        self._outcomes: ByteCache[tuple[str, str]] = ByteCache(_MAX_KEPT_BYTES)

    async def compile(self, constraint: Constraint) -> str:
        """The compiled grammar. Raises ApiError, Busy."""
        param = constraint.param
        try:
            grammar, refusal = await self._outcome(constraint.request)
        except ChildFailed as failure:
            raise invalid_value(param, f"{param} cannot be compiled: {failure}") from None
        except ChildUnreadable:
            raise RuntimeError("llguidance cannot be loaded") from None
        if refusal:
            path, message = json.loads(refusal)
            param = f"{param}.{path}" if path else param
            raise invalid_value(param, f"{param}: {message}")
        return grammar

    async def _outcome(self, request: Mapping[str, Any]) -> tuple[str, str]:
        """Raises ChildFailed, ChildUnreadable, Busy."""
        key = encoded(request)
        if (outcome := self._outcomes.get(key)) is None:
            try:
                outcome = await self._processes.ask(msgspec.Raw(key)), ""
            except Refused as refused:
                outcome = "", str(refused)
            num_bytes = sum(map(sys.getsizeof, outcome))
            self._outcomes.keep(key, outcome, num_bytes, current_owner().tenant)
        return outcome

    async def aclose(self) -> None:
        await self._processes.aclose()
