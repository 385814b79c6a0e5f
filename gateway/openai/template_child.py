"""`python -m gateway.openai.template_child`: the process that renders a chat template."""

from collections.abc import Callable
from typing import Any

from gateway.openai.child import serve


def prepare(start: Any) -> Callable[[Any], str]:
    from gateway.openai.chat_template import ChatTemplate  # the gateway imports this module too

    template = ChatTemplate(start["source"], start["special_tokens"])
    return lambda request: template.render(*request)


if __name__ == "__main__":
    serve(prepare)
