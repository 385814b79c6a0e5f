"""`python -m gateway.grammars.child`: the process that compiles callers' grammars."""

import json
from collections.abc import Callable
from typing import Any

from gateway.child import Refused, serve


def prepare(start: Any) -> Callable[[Any], str]:
    from gateway.grammars.compiled import GrammarRefused, Kind, compile_grammar

    def compile_request(request: Any) -> str:
        try:
            return compile_grammar(**request | {"kind": Kind(request["kind"])})
        except GrammarRefused as refusal:
            raise Refused(json.dumps([refusal.path, str(refusal)])) from None
        except MemoryError:
            raise
        except Exception:  # of a keyword with a value that no schema has, as an enum of 1.5
            raise Refused(json.dumps(["", "it is not a valid schema"])) from None

    return compile_request


if __name__ == "__main__":
    serve(prepare)
