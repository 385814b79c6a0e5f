"""Parameters that other servers know and this one does not do: refused by name, never ignored.

A value that asks for nothing (null, or the ones listed) is dropped, since clients send them.
"""

from collections.abc import Mapping
from typing import Any

from gateway.errors import bad_request

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
    "function_call": (),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": (),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
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


def _message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    path = f"messages.{index}."
    if _is_one_of(message.get("role"), _ROLES):
        raise bad_request("unsupported_parameter", "tools are not supported yet", f"{path}role")
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else []):
        if isinstance(part, dict) and _is_one_of(part.get("type"), _PARTS):
            where = f"{path}content.{i}.type"
            raise bad_request("unsupported_parameter", "only text parts are supported", where)
    return _without(message, _OF_MESSAGES, path)


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
            message = f"{name} is not supported with this value"
            raise bad_request("unsupported_parameter", message, f"{path}{name}")
    return kept
