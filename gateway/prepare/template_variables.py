"""The variables of a model's chat template, apart from messages and tools."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from contract.model_cards import TokenizerFiles
from gateway.http.errors import UNSUPPORTED, bad_request
from gateway.prepare.unsupported import refusal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_MAX_VARIABLES = 64
# Variables that the gateway sets itself, or that have a parameter of the call.
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# Variables of real templates -> their value for an effort; None: as if it were not given.
_OF_EFFORT: Mapping[str, Callable[[Effort], Any]] = {
    "reasoning_effort": lambda effort: effort,  # gpt-oss, Solar, DeepSeek V4
    "thinking_effort": lambda effort: effort,  # Kimi K3
    "enable_thinking": lambda effort: effort != "none",  # Qwen3, GLM, and most others
    "thinking": lambda effort: effort != "none",  # DeepSeek V3.1, Granite
    "thinking_mode": lambda effort: "disabled" if effort == "none" else "enabled",  # MiniMax M3
    "thinking_budget": lambda effort: 0 if effort == "none" else None,  # Seed-OSS
}


def _checked(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _OWN or name.endswith("_token"):
            raise refusal("is not for chat_template_kwargs", name)
    return variables


Variables = Annotated[dict[str, Any], Field(max_length=_MAX_VARIABLES), AfterValidator(_checked)]


def template_variables(
    files: TokenizerFiles,
    effort: Effort | None,
    given: Mapping[str, Any] | None,
    param: str = "reasoning_effort",
) -> dict[str, Any]:
    """Returns the operator's variables, those of the effort and the caller's; later ones win.
    Raises ApiError for an effort if the template has no variable for it, except "none" for a model
    that does not reason."""
    variables = dict(files.template_kwargs)
    if effort is not None:
        known = [name for name in files.template_variables if name in _OF_EFFORT]
        if not known and (effort != "none" or files.reasoning is not None):
            message = f"{param}: the model's chat template knows no degrees of reasoning"
            raise bad_request(UNSUPPORTED, message, param)
        values = {name: _OF_EFFORT[name](effort) for name in known}
        variables |= {name: value for name, value in values.items() if value is not None}
    return variables | dict(given or {})
