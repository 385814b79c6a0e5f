"""Tool calls in answers, from the deltas of a log."""

from collections.abc import Mapping, Sequence
from typing import Any

from contract.events import ToolCallDelta
from contract.jobs import Job
from contract.response_events import call_id


def delta_of(job: Job, choice: int, call: ToolCallDelta) -> dict[str, Any]:
    """A part of a call in a chunk. The first part has id, type and name."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call_id(job, choice, call.index),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def whole_calls(job: Job, choice: int, deltas: Sequence[ToolCallDelta]) -> list[Mapping[str, Any]]:
    """The calls of a whole response."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        names.setdefault(delta.index, delta.name)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        {
            "id": call_id(job, choice, index),
            "type": "function",
            "function": {"name": name, "arguments": "".join(arguments[index])},
        }
        for index, name in names.items()
    ]
