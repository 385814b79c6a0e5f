"""Options for how a model generates and chats: its own sampling settings, the formats of its
reasoning and tool calls, the variables of its chat template.
"""

import argparse
from typing import Any

import msgspec

from infra.option_values import json_object


def add_generation_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: the sampling settings of the model's generation_config.json hold where a "
        "caller gives none; none: they do not (default: auto)",
    )
    group.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="the format of the model's tool calls, see docs/models.md; auto: what its chat "
        "template shows; none: it calls no tools (default: auto)",
    )
    group.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="the format of the model's reasoning, see docs/models.md; auto: what its chat "
        "template shows; none: all of its output is the answer (default: auto)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help='variables of the chat template, as {"enable_thinking": false}, unless a call gives '
        "them (default: none)",
    )


def generation_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineOptions for these options."""
    return {
        "generation_config": options.generation_config,
        "tool_call_parser": options.tool_call_parser,
        "reasoning_parser": options.reasoning_parser,
        "chat_template_kwargs": options.default_chat_template_kwargs,
    }


def generation_arguments(options: argparse.Namespace) -> list[str]:
    """The same options, as arguments of a worker."""
    variables = msgspec.json.encode(options.default_chat_template_kwargs).decode()
    return [
        f"--generation-config={options.generation_config}",
        f"--tool-call-parser={options.tool_call_parser}",
        f"--reasoning-parser={options.reasoning_parser}",
        f"--default-chat-template-kwargs={variables}",
    ]
