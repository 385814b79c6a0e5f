"""Parameters that constrain the output: OpenAI's `response_format`, vLLM's `structured_outputs` and
`guided_*`.

At most one may be given. It becomes the job's grammar.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gateway.grammars.compiler import Constraint
from gateway.http.bodies import parse_json
from gateway.http.errors import invalid_value
from gateway.prepare.unsupported import StrictModel, refusal

MAX_CHOICES = 10_000
_MAX_TEXT = 64 * 1024

Schema = dict[str, Any]
Expression = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(StrictModel):
    """The `json_schema` of a response format."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("must be given with type json_schema, and only then", "json_schema")
        return self


class StructuredOutputs(StrictModel):
    """vLLM's parameter: exactly one of these."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: Expression | None = None
    choice: Choices | None = None
    grammar: Expression | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise refusal("give exactly one of json, regex, choice, grammar and json_object")
        return self


class Constrained(StrictModel):
    """The parameters of a call that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: Expression | None = None
    guided_choice: Choices | None = None
    guided_grammar: Expression | None = None

    @model_validator(mode="after")
    def _constrains_once(self) -> Self:
        given = [name for name in Constrained.model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise refusal(f"cannot be combined with {given[0]}", given[1])
        return self

    def constraint(self) -> "Constraint | None":
        """The constraint on the output, if any."""
        if (format_ := self.response_format) is not None:
            if format_.json_schema is not None:
                schema, strict = format_.json_schema.schema_, format_.json_schema.strict
                name = "response_format.json_schema.schema"
                return Constraint(name, "json_schema", schema or {}, bool(strict))
            if format_.type == "json_object":
                return Constraint("response_format", "json_schema", {"type": "object"})
            return None
        asked = self.structured_outputs
        if asked is not None and asked.json_object:
            return Constraint("structured_outputs", "json_schema", {"type": "object"})
        prefix = "guided_" if asked is None else "structured_outputs."
        for name in ("json", "regex", "choice", "grammar"):
            if asked is None:
                value = getattr(self, f"guided_{name}")
            else:
                value = asked.json_ if name == "json" else getattr(asked, name)
            if value is not None:
                kind = "json_schema" if name == "json" else name
                return Constraint(prefix + name, kind, _parsed(prefix, name, value))
        return None


def _parsed(prefix: str, name: str, value: Any) -> Any:
    """Parses a schema that vLLM's clients send as text. Raises ApiError."""
    if name != "json" or not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except ValueError:
        raise invalid_value(prefix + name, f"{prefix}{name} is not JSON") from None
