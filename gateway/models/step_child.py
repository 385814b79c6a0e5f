"""`python -m gateway.models.step_child`: renders the bodies of pipelines' steps."""

import json
from collections.abc import Callable
from typing import Any

from gateway.child import Refused, serve

_MAX_BODY_CHARS = 4 * 1024 * 1024


def prepare(_: Any) -> Callable[[Any], str]:
    import msgspec

    from contract.flows import Step
    from gateway.models.step_bodies import render  # the gateway imports this module too

    def answer(request: Any) -> str:
        step = msgspec.convert(request["step"], Step)
        body = json.dumps(render(step, request["values"]), ensure_ascii=False)
        if len(body) > _MAX_BODY_CHARS:
            raise Refused(f"step {step.name}: body: it has over {_MAX_BODY_CHARS} characters")
        return body

    return answer


if __name__ == "__main__":
    serve(prepare)
