"""`python -m gateway.openai.template_child`: the process that renders a chat template."""

import json
from collections.abc import Callable
from typing import Any

from gateway.openai.child import serve


def prepare(start: Any) -> Callable[[Any], str]:
    from gateway.openai.chat_template import ChatTemplate  # the gateway imports this module too

    template = ChatTemplate(start["source"], start["special_tokens"])

    def answer(request: Any) -> str:
        """One prompt, or for pairs a JSON list of them."""
        if isinstance(request, dict):
            return json.dumps(template.render_pairs(**request), ensure_ascii=False)
        return template.render(*request)

    return answer


if __name__ == "__main__":
    serve(prepare)
