"""`python -m gateway.models.template_child`: the process that renders a model's chat templates."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.child import Refused, serve


def prepare(start: Any) -> Callable[[Any], str]:
    from gateway.models.chat_template import ChatTemplate  # the gateway imports this module too

    plain = ChatTemplate(start["source"], start["special_tokens"])
    with_tools = plain
    if start["tool_source"] is not None:
        with_tools = ChatTemplate(start["tool_source"], start["special_tokens"])

    def answer(request: Any) -> str:
        """Returns one prompt, or a JSON list of them for pairs."""
        if "pairs" in request:
            return json.dumps(plain.render_pairs(**request), ensure_ascii=False)
        if not request["tools"]:
            return plain.render(**request)
        try:
            return with_tools.render(**request)
        except Refused:
            described = [_described(tool) for tool in request["tools"]]
            if described == request["tools"]:
                raise
        return with_tools.render(**{**request, "tools": described})

    return answer


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tool with fields that callers may omit and some templates need."""
    left_out = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**left_out, **tool["function"]}}


if __name__ == "__main__":
    serve(prepare)
