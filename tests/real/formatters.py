"""The model makers' own formatters, in an environment of their own: reads a list of questions as
JSON, prints the answers. `ENCODINGS`: a folder with gpt-oss's vocabulary for openai-harmony.

    {"mistral": {"messages": […], "tools": […]}}  ->  the token ids of the prompt
    {"harmony": TOKEN_IDS}  ->  the messages of a completion: channel, recipient and text of each
"""

import json
import os
import sys
from typing import Any

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

os.environ["TIKTOKEN_ENCODINGS_BASE"] = os.environ["ENCODINGS"]


def main() -> None:
    mistral = MistralTokenizer.v3(is_tekken=True)
    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def answer(question: dict[str, Any]) -> Any:
        if "mistral" in question:
            request = ChatCompletionRequest(**question["mistral"])
            return mistral.encode_chat_completion(request).tokens
        messages = harmony.parse_messages_from_completion_tokens(
            question["harmony"], Role.ASSISTANT
        )
        return [
            [message.channel, message.recipient, "".join(part.text for part in message.content)]
            for message in messages
        ]

    json.dump(list(map(answer, json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()
