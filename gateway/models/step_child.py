"""`python -m gateway.models.step_child`: renders the bodies of pipelines' steps."""

import json
from collections.abc import Callable
from typing import Any

from gateway.child import Refused, serve

_MAX_BODY_CHARS = 4 * 1024 * 1024


class TemplateFault(Exception):
    """A step's body cannot be made. The message names the step and the place, not the values."""


def prepare(_: Any) -> Callable[[Any], str]:
    import msgspec

    from contract.flows import Step
    from gateway.models import step_bodies as templates  # the gateway imports this module too

    def answer(request: Any) -> str:
        step = msgspec.convert(request["step"], Step)
        try:
            body = json.dumps(templates.render(step, request["values"]), ensure_ascii=False)
        except templates.TemplateFault as fault:
            raise Refused(str(fault)) from None
        if len(body) > _MAX_BODY_CHARS:
            raise Refused(f"step {step.name}: body: it has over {_MAX_BODY_CHARS} characters")
        return body

    return answer


if __name__ == "__main__":
    serve(prepare)
