"""The gateway's side of the processes that render the bodies of pipelines' steps.

A template is its operator's, but the values are a caller's: loops over them may take any time and
memory.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from contract.flows import Step
from gateway.child import Refused
from gateway.child_process import ChildFailed, ChildLimits, ChildPool, ChildUnreadable


class TemplateFault(Exception):
    """A step's body cannot be made. The message names the step and the place, not the values."""


class StepTemplates:
    """The processes of one gateway that render steps' bodies."""

    def __init__(self, limits: ChildLimits | None = None) -> None:
        self._processes = ChildPool("gateway.models.step_bodies", {}, limits or ChildLimits())

    @property
    def pid(self) -> int | None:
        """The id of the process that answers next; None if there is none."""
        return self._processes.pid

    async def render(self, step: Step, values: Mapping[str, Any]) -> dict[str, Any]:
        """The step's body. `values`: as in step_bodies.py. Raises TemplateFault, Busy."""
        try:
            body = await self._processes.ask({"step": step, "values": values})
            rendered: dict[str, Any] = from_json(body, allow_inf_nan=False)
        except Refused as refusal:
            raise TemplateFault(str(refusal)) from None
        except (ChildFailed, ValueError) as failure:
            raise TemplateFault(f"step {step.name}: its templates failed: {failure}") from None
        except ChildUnreadable:
            raise RuntimeError("jinja2 cannot be loaded") from None
        return rendered

    async def aclose(self) -> None:
        await self._processes.aclose()
