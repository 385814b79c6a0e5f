"""The base classes of request bodies, and what becomes of names that they do not have.

Parameters of other servers that would change the response are rejected by name, unless the value is
one without effect (null, or one that is listed). At the top of a body an unknown name is rejected
too, as it may be misspelt, unless clients are known to send it. All others are ignored, and a
response header names them.
"""

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from contract.model_cards import ModelCard
from gateway.http.errors import UNKNOWN, ApiError, invalid_value
from gateway.http.errors import UNSUPPORTED as CODE
from gateway.models.tokens import Cut

WHOLE = -1  # the model's length


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
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),  # no effect without functions
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Names at the top of a body that clients are known to send, and that change no answer: for tracing,
# caching and routing elsewhere, and hints to a scheduler.
IGNORED = frozenset(
    {
        *("prediction", "prompt_cache_options", "store"),  # OpenAI
        *("cache_salt", "priority", "request_id", "session_id"),  # vLLM, Cohere
        *("cache_control", "provider", "usage"),  # OpenRouter
        *("extra_headers", "extra_query", "timeout"),  # options of OpenAI's client
        *("litellm_metadata", "litellm_session_id", "litellm_trace_id"),
        *("cache_prompt", "id_slot", "timings_per_token"),  # llama.cpp
        *("keep_alive", "ttl"),  # Ollama, LM Studio
        *("chat_id", "conversation_id", "tags", "thread_id", "trace_id"),
    }
)
# Parts of a message that the model would not see.
OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "refusal": (),
}
ROLES = frozenset({"function"})
PARTS = frozenset({"image_url", "input_audio", "file", "refusal", "video_url", "audio_url"})
TEXT_PART = frozenset({"type", "text"})
_MAX_NAMES, _MAX_NAME = 20, 100  # of ignored names in the header: how many, and characters of each
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$@/-]")  # in a header


def refusal(message: str, param: str | None = None, code: str = "refused") -> PydanticCustomError:
    """An error for validators to raise. `param` is a path relative to the validated value."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": param})


def unsupported(message: str, param: str | None = None) -> PydanticCustomError:
    return refusal(message, param, CODE)


class StrictModel(BaseModel):
    """The base class of bodies and of objects in them: rejects wrong types and coercions.

    Unknown names are ignored. In a body, which has `extra="forbid"`, they may be misspelt: they are
    rejected, but for IGNORED.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)

    unasked: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # parameter -> values without effect
    # Fields of which validators take texts out of objects -> the known names of those objects.
    names_of_objects: ClassVar[Mapping[str, frozenset[str]]] = {}

    _ignored: tuple[str, ...] = PrivateAttr(())  # names given here, below them dots

    @model_validator(mode="wrap")
    @classmethod
    def _with_known_names(cls, fields: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return validated(fields)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept, ignored = dict[str, Any](), list[str]()
        for name, value in fields.items():
            if name in known:
                kept[name] = value
            elif name in cls.unasked:
                _check_asks_for_nothing(name, value, cls.unasked[name])
            elif cls.model_config["extra"] != "forbid":
                ignored.append(name)
            elif name not in IGNORED:
                similar = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {similar[0]}?" if similar else ""
                raise refusal(f"unknown parameter{hint}", name, UNKNOWN)
            elif value:  # false, 0 and null ask for nothing
                ignored.append(name)
        for name, names in cls.names_of_objects.items():
            given = kept.get(name)
            for each in given if isinstance(given, list) else ():
                if isinstance(each, dict):
                    ignored += [f"{name}.{other}" for other in each if other not in names]
        model = validated(kept)
        if ignored:
            model._ignored = tuple(dict.fromkeys(ignored))
        return model


class OwnModel(StrictModel):
    """A body of this server's own, or an object in one: no other server's clients send it."""

    model_config = ConfigDict(extra="forbid")


def _check_asks_for_nothing(name: str, value: Any, unasked: tuple[Any, ...]) -> None:
    """Raises PydanticCustomError unless the value has no effect."""
    if value is not None and value not in unasked:
        possible = " or ".join(json.dumps(taken) for taken in unasked)
        message = "not supported with this value; leave it out"
        raise unsupported(message + (f", or send {possible}" if possible else ""), name)


class CallFields(StrictModel):
    """The fields of every call. None always means the default."""

    model_config = ConfigDict(extra="forbid")

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
    there are none. Those in objects are named by their path without positions."""
    found = [name for name in body.ignored if getattr(body, name) is not None]
    names = list(dict.fromkeys(itertools.chain(found, _ignored_in(body))))
    shown = [_UNSAFE.sub("?", name[:_MAX_NAME]) for name in names[:_MAX_NAMES]]
    if len(names) > _MAX_NAMES:
        shown.append("...")
    return {"x-ignored-parameters": ", ".join(shown)} if shown else {}


def _ignored_in(model: StrictModel) -> Iterator[str]:
    yield from model._ignored
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, StrictModel):
                yield from (f"{field.alias or name}.{path}" for path in _ignored_in(each))


def _not_zero(value: Any) -> Any:
    if value == 0:
        raise refusal("must be at least 1, or -1: the model's length")
    return value


class Truncated(StrictModel):
    """Fields of all calls."""

    truncate_prompt_tokens: (
        Annotated[int, Field(ge=WHOLE, lt=2**31), AfterValidator(_not_zero)] | None
    ) = None
    truncation_side: Literal["left", "right"] | None = None  # which is cut off

    def cut(self, card: ModelCard, *, room: int, cuts_left: bool) -> Cut | None:
        """Returns how the model's prompts are cut; None if they are not. `room`: the tokens of the
        longest prompt that the model allows; `cuts_left`: the default side. Raises ApiError."""
        asked = self.truncate_prompt_tokens
        if asked is None:
            if not card.truncates:
                return None
            asked = WHOLE
        if asked > card.context_length:
            name = "truncate_prompt_tokens"
            raise invalid_value(name, f"{name} may be at most {card.context_length} here")
        side = self.truncation_side
        return Cut(room if asked == WHOLE else asked, cuts_left if side is None else side == "left")


class TruncatedTexts(Truncated):
    """Fields of calls for vectors."""

    # Cohere's; true and false as in other servers.
    truncate: Literal["NONE", "START", "END"] | bool | None = None

    @model_validator(mode="after")
    def _is_one_wish(self) -> Self:
        if self.truncate is not None and self.truncation_side is not None:
            raise refusal("cannot be combined with truncate", "truncation_side")
        if self.truncate in ("NONE", False) and self.truncate_prompt_tokens is not None:
            raise refusal("cannot be combined with truncate_prompt_tokens", "truncate")
        return self

    def cut_texts(self, card: ModelCard) -> Cut | None:
        """Returns how texts are cut; None if they are not. Raises ApiError."""
        if self.truncate in ("NONE", False):
            return None
        cut = self.cut(card, room=card.context_length, cuts_left=self.truncate == "START")
        if cut is None and self.truncate is not None:
            return Cut(card.context_length, self.truncate == "START")
        return cut


def no_room(param: str) -> ApiError:
    """The error for a text of which nothing would be left."""
    message = f"{param}: nothing would be left of it: allow more tokens"
    return invalid_value(param, message)
