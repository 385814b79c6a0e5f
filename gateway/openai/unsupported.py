"""The base classes of request bodies, and parameters of other servers that are not supported.

Values without effect (null, or a value listed here) are dropped, because clients send them.
Parameters that would change the response are rejected by name. Others are ignored, and a response
header names them.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.http.errors import UNKNOWN
from gateway.http.errors import UNSUPPORTED as CODE

# OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]

# Parameter -> values without effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),  # no effect without functions
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "refusal": (),
}
# LiteLLM keeps a provider's other fields under this name in the messages of its histories.
DROPPED_OF_MESSAGES = frozenset({"provider_specific_fields"})
ROLES = frozenset({"function"})
PARTS = frozenset({"image_url", "input_audio", "file", "refusal", "video_url", "audio_url"})


def refusal(message: str, param: str | None = None, code: str = "refused") -> PydanticCustomError:
    """An error for validators to raise. `param` is a path relative to the validated value."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": param})


def unsupported(message: str, param: str | None = None) -> PydanticCustomError:
    return refusal(message, param, CODE)


def without(fields: Mapping[str, Any], unasked: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The fields without those that have no effect. Raises PydanticCustomError."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in unasked:
            kept[name] = value
        elif value is not None and value not in unasked[name]:
            possible = " or ".join(json.dumps(taken) for taken in unasked[name])
            message = "not supported with this value; leave it out"
            raise unsupported(message + (f", or send {possible}" if possible else ""), name)
    return kept


class StrictModel(BaseModel):
    """The base class of request bodies: rejects unknown names, wrong types and coercions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    unasked: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # parameter -> values without effect
    dropped: ClassVar[frozenset[str]] = frozenset()  # parameters without effect, whatever the value

    @model_validator(mode="before")
    @classmethod
    def _with_known_names(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = without({k: v for k, v in fields.items() if k not in cls.dropped}, cls.unasked)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in kept:
            if name not in known:
                similar = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {similar[0]}?" if similar else ""
                raise refusal(f"unknown parameter{hint}", name, UNKNOWN)
        return kept


class CallFields(StrictModel):
    """The fields of every call. None always means the default."""

    # Validated, but without effect.
    ignored: ClassVar[tuple[str, ...]] = (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    )

    model: Annotated[str, Field(min_length=1, max_length=256)]
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    # None: depends on the idempotency key
    on_disconnect: Literal["cancel", "continue"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Annotated[str, Field(max_length=64)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


def ignored_header(body: CallFields) -> dict[str, str]:
    """The header `x-ignored-parameters`, with the body's parameters that have no effect; {} if
    there are none."""
    names = [name for name in body.ignored if getattr(body, name) is not None]
    return {"x-ignored-parameters": ", ".join(names)} if names else {}
