"""The gateway's side of the processes that render a model's chat templates."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.child import Refused
from gateway.child_process import (
    ChildFailed,
    ChildLimits,
    ChildPool,
    ChildUnreadable,
)
from gateway.http.errors import ModelUnreadable, TemplateFailed, TemplateRefused
from gateway.models import template_child

log = logging.getLogger("batchway.gateway")


class TemplateProcess:
    """One model's chat templates, in processes of their own."""

    def __init__(
        self,
        model: str,
        source: str,
        special_tokens: Mapping[str, str],
        limits: ChildLimits | None = None,
        *,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source`: the template of chats with tools, if they have another one."""
        self._model = model
        start = {
            "source": source,
            "tool_source": tool_source,
            "special_tokens": dict(special_tokens),
        }
        self._processes = ChildPool(template_child.__name__, start, limits or ChildLimits())

    @property
    def pid(self) -> int | None:
        """The id of the process that answers next; None if there is none."""
        return self._processes.pid

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, up to the start of the assistant's message. `variables`: others that the
        template reads.

        Raises TemplateRefused, TemplateFailed, Busy, ModelUnreadable.
        """
        request = {"messages": messages, "tools": tools, "variables": variables}
        return await self._ask(request)

    async def render_pairs(self, instruction: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """The prompt of each query and document. Raises as `render`."""
        rendered = await self._ask({"instruction": instruction, "pairs": pairs})
        prompts: list[str] = json.loads(rendered)
        return prompts

    async def _ask(self, request: object) -> str:
        try:
            return await self._processes.ask(request)
        except Refused as refusal:
            raise TemplateRefused(str(refusal)) from None
        except ChildUnreadable:
            log.error("chat template refused: jinja2 cannot read it model=%s", self._model)
            raise ModelUnreadable(self._model, "chat template") from None
        except ChildFailed as failure:
            log.warning("chat template failed: %s model=%s", failure, self._model)
            raise TemplateFailed(f"the model's chat template failed: {failure}") from failure

    async def aclose(self) -> None:
        """Ends the processes, at once or after their current requests."""
        await self._processes.aclose()
