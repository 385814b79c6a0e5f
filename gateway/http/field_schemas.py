"""What the OpenAPI document says of fields that `schemas` looks at by hand."""

from pydantic import WithJsonSchema

MAX_STOPS = 4
MAX_STOP_BYTES = 64
MAX_PROMPTS = 64

STOPS_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES},
            {
                "type": "array",
                "maxItems": MAX_STOPS,
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES},
            },
        ]
    }
)
CONTENT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    "required": ["type", "text"],
                    "additionalProperties": False,
                },
            },
        ]
    }
)
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            _TOKEN_IDS,
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_PROMPTS,
                "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]},
            },
        ]
    }
)
