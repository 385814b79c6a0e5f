"""Parameters that other servers know and this one does not.

A value that asks for nothing (null, or one that is listed here) is dropped, since clients send it.
What would change the answer is refused by name. What would not is ignored, and a header says so.
"""

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from gateway.http.errors import ApiError, bad_request

# Parameter → values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    # Without functions and tools there is nothing to call, so that these change nothing.
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (False, True),
    "prediction": (),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Known, checked, and without any effect on the answer.
IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
)
_OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_ROLES = frozenset({"tool", "function"})
_PARTS = frozenset({"image_url", "input_audio", "file", "refusal", "video_url", "audio_url"})


def refuse_unsupported(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The body without what asks for nothing. Raises ApiError."""
    fields = _without(raw, UNSUPPORTED, "")
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_message(message, i) for i, message in enumerate(messages)]
    return fields


def ignored_header(raw: Mapping[str, Any]) -> dict[str, str]:
    """`x-ignored-parameters`, with the names in a body that change nothing here; {} without any."""
    names = [name for name in IGNORED if raw.get(name) is not None]
    return {"x-ignored-parameters": ", ".join(names)} if names else {}


def unknown_parameter(param: str, known: Collection[str]) -> ApiError:
    """What refuses a name that nobody knows; `known` are the names in its place."""
    similar = difflib.get_close_matches(param.rpartition(".")[2], known, n=1)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    return bad_request("unknown_parameter", f"unknown parameter: {param}{hint}", param)


def _message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    path = f"messages.{index}."
    if _is_one_of(message.get("role"), _ROLES):
        text = "tools are not supported yet: the roles are system, developer, user and assistant"
        raise bad_request("unsupported_parameter", text, f"{path}role")
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, dict) and _is_one_of(part.get("type"), _PARTS):
            where = f"{path}content.{i}.type"
            raise bad_request("unsupported_parameter", "only text parts are supported", where)
    kept = _without(message, _OF_MESSAGES, path)
    if kept.get("role") == "assistant" and kept.get("content", "") is None:
        kept["content"] = ""
    return kept


def _is_one_of(value: Any, names: frozenset[str]) -> bool:
    """Whatever JSON the value is: lists and objects cannot be looked for in a set."""
    return isinstance(value, str) and value in names


def _without(
    fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], path: str
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in unsupported:
            kept[name] = value
        elif value is not None and value not in unsupported[name]:
            possible = " or ".join(json.dumps(taken) for taken in unsupported[name])
            message = f"{name} is not supported with this value; leave it out"
            message += f", or send {possible}" if possible else ""
            raise bad_request("unsupported_parameter", message, f"{path}{name}")
    return kept
