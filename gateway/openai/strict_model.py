"""The base class of request bodies: rejects unknown names, wrong types and coercions."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from gateway.http.errors import UNKNOWN
from gateway.openai.unsupported import refusal, without


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    unasked: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # parameter -> values without effect

    @model_validator(mode="before")
    @classmethod
    def _with_known_names(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = without(fields, cls.unasked)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in kept:
            if name not in known:
                similar = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {similar[0]}?" if similar else ""
                raise refusal(f"unknown parameter{hint}", name, UNKNOWN)
        return kept
