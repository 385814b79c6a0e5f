"""Values for mutations: at and over the limits of each field, numbers, texts, names, bytes,
headers, queries."""

from collections.abc import Mapping, Sequence
from typing import Any

Header = tuple[bytes, bytes]

_PENALTIES = (-2, 2, -2.0, -0.0, 0, 1e-300, 2.0000000000000004)
_TOP = (0, 1, 20, 20, 21)
LIMITS: Mapping[str, Sequence[Any]] = {  # of a call: at the limits of what is allowed, and over
    "temperature": (0, -0.0, 2, 5e-324, 1e-9, 1.9999999999999998, 2.0000000000000004),
    "top_p": (1, 1.0, 5e-324, 0.9999999999999999, 1e-9, 0),
    "top_k": (-1, 0, 1, 259, 260, 2**31 - 1, 2**31),
    "min_p": (0, 1, 5e-324, -0.0, 1.0000000000000002),
    "presence_penalty": _PENALTIES,
    "frequency_penalty": _PENALTIES,
    "repetition_penalty": (2, 1, 5e-324, 1e-9, 0),
    "logit_bias": (
        {},
        {"0": 100, "258": -100},
        {"007": 1},
        {"1": -0.0, "01": 2},
        {str(i): 100 for i in range(259)},
        {str(i): -100 for i in range(258)},
        {"259": 1},
        {"²": 1},
    ),
    "seed": (0, -1, 2**63 - 1, -(2**63), 2**53 + 1, 2**63),
    "n": (1, 2, 3, 4, 8, 9),
    "stop": ("x", [], ["\n"], ["a", "b", "c", "d"], ["\u0000"], ["🌍" * 10], "é", [""], "s" * 1000),
    "stop_token_ids": ([], [0], [258], list(range(64)), [65] * 64, list(range(65)), [259]),
    "max_tokens": (1, 2, 16, 60, 0, 10**6),
    "min_tokens": (0, 1, 2, 4, 5),
    "ignore_eos": (True, False),
    "stream": (True, False),
    "stream_options": ({}, {"include_usage": True}, {"include_obfuscation": True}),
    "return_token_ids": (True, False),
    "prompt_logprobs": _TOP,
    "service_tier": ("auto", "default", "priority", "flex", "scale"),
    "on_disconnect": ("cancel", "continue"),
    "user": ("", "u" * 512, "🌍" * 512, "u" * 513),
    "metadata": ({}, {"": ""}, {f"k{i}": "v" * 512 for i in range(16)}, {"k" * 500: "v"}),
}
OF_CHAT: Mapping[str, Sequence[Any]] = {
    "logprobs": (True, False),
    "top_logprobs": _TOP,
    "max_completion_tokens": (1, 4, 5, 60),
    "messages": (
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "canary-alone"}],
        [{"role": "user", "content": [{"type": "text", "text": ""}]}],
        [{"role": "user", "content": "c"}] * 9,
        [{"role": "assistant", "content": "canary-first", "name": "n" * 64}],
        [],
    ),
}
OF_COMPLETIONS: Mapping[str, Sequence[Any]] = {
    "logprobs": _TOP,
    "echo": (True, False),
    "best_of": (1, 2, 4),
    "prompt": (
        *("a", [0], [258], [256, 257], ["a"], [[257]], "canary-" * 20, "<eos><bos>", "", []),
        *(["a", "b"], [[1], [2]], ["same"] * 3, ["a"] * 64, ["a"] * 65, ["a", ""], ["a", [1]]),
    ),
}
_INPUTS: Sequence[Any] = (
    "a",
    ["a"] * 9,
    [1],
    [[1], [2]],
    "",
    [],
    ["a", ""],
    ["a", [1]],
    [259],
    ["a"] * 2049,
)
_OF_VECTORS: Mapping[str, Sequence[Any]] = {
    name: LIMITS[name] for name in ("service_tier", "on_disconnect", "user", "metadata", "stream")
}
OF_VECTORS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "/v1/embeddings": {
        **_OF_VECTORS,
        "input": _INPUTS,
        "dimensions": (2, 4, 8, 3, 0),
        "input_type": ("query", "document", "clustering", "none"),
        "encoding_format": ("float", "base64", "int8"),
    },
    "/v1/rerank": {
        **_OF_VECTORS,
        "documents": (["a"] * 9, [{"text": "a"}], [], ["a", ""], [{}], ["a"] * 2049),
        "query": ("a", "", "q" * 50),
        "top_n": (0, 1, 9, -1),
        "return_documents": (True, False),
    },
    "/v1/score": {**_OF_VECTORS, "text_1": ("a", ["a"], []), "text_2": ("a", ["a"], ["a"] * 9)},
    "/v1/classify": {**_OF_VECTORS, "input": _INPUTS},
}
OF_JOBS: Mapping[str, Sequence[Any]] = {
    "lane": ("interactive", "standard", "batch", "scoring", "nowhere"),
    "deadline_s": (1, 1.5, 604_800, 3e5, 86_400.000001, 604_801),
    # Longer than a run takes: the audit wants no record to expire while it reads.
    "retention_s": (7_200, 7_200.0, 1e5, 2_592_000, 59.999, 2_592_001),
    "metadata": ({}, {"k" * 64: "v" * 512}, {"🌍" * 64: ""}, {"k" * 65: "v"}, {"": "v"}),
    "callback": (
        None,
        {"url": "https://receiver.invalid/", "secret": "whsec_" + "A" * 32},
        {"url": "https://receiver.invalid:65535/?%41", "secret": "whsec_" + "A" * 32},
        {"url": "https://receiver.invalid/", "secret": "whsec_A"},
        {"url": "http://receiver.invalid/", "secret": "whsec_" + "A" * 32},
        {"url": "httpſ://receiver.invalid/", "secret": "whsec_" + "A" * 32},
        {"url": "https://receiverK.invalid/", "secret": "whsec_" + "A" * 32},
    ),
}
OF_CHANGES: Mapping[str, Sequence[Any]] = {
    "lane": (*OF_JOBS["lane"], None),
    "deadline_s": (604_800, 3_600.5, 1e5, 604_801, None),
}
ASKS_FOR_NOTHING: Mapping[str, Sequence[Any]] = {
    "tools": (None,),
    "store": (False, True),
    "suffix": ("", "x"),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "chat_template_kwargs": ({}, {"a": 1}),
    "priority": (0, 0.0, -0.0, 1),
    "bad_words": ([], ["a"]),
}
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, -0.0, 0.5, 1.0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(10**400, 1e308, -1e308, 5e-324, 1e-400, float("nan"), float("inf"), float("-inf")),
)
OTHERS: tuple[Any, ...] = (None, True, False, "", "1", [], {}, [[]], {"a": {}}, 1, 0.5, [None])
TEXTS: tuple[str, ...] = (
    *("\u0000", "\u0001\u0002", "\u001b[2J", "\r\n", "\t", "\u007f", "\u0085", "\u2028", "\ufeff"),
    *("é", "e\u0301\u0323", "ß", "ſ", "K", "İ", "ı", "\u202e", "\u200b", "\u00ad", "\ufffd"),
    *(
        "\uffff",
        "\ue000",
        "漢字",
        "한국",
        "𝒳",
        "🌍",
        "👩\u200d👩\u200d👧",
        "🇺🇳",
        "\U0010ffff",
        "\u1160",
    ),
    *("<eos>", "<bos>", "<pad>", "<|im_end|>", "{{ 7 * 7 }}", "{% raw %}", "%s%n", "${x}", "../"),
    *("'", '"', "\\", "\\u0000", "</script>", "data: [DONE]\n\n", "a" * 40, " " * 40, "\n" * 40),
)
SURROGATES = ("\ud800", "\udfff", "\udc00\ud800", "a\ud83d", "\udbff\udc01")
NAMES = (
    "canary-field",
    "",
    "__class__",
    "model ",
    "Model",
    "n\u0000",
    "\ud800",
    "a.b",
    "0",
    "ſtop",
)

# Fields whose texts a caller is free to choose; other texts are words of ours.
FREE = frozenset(
    {
        *("prompt", "content", "text", "stop", "user", "safety_identifier", "prompt_cache_key"),
        *("metadata", "messages", "input", "query", "documents", "text_1", "text_2"),
    }
)
_PREFERENCES: tuple[bytes, ...] = (
    *(b"respond-async", b"wait=0", b"wait=20", b"respond-async, wait=1", b"wait=\xb2", b","),
    *(b"handling=strict", b"wait=-1", b"RESPOND-ASYNC;x=y", b"wait=999999999"),
)
HEADERS: tuple[Header, ...] = (
    *((b"prefer", value) for value in _PREFERENCES),
    *((b"idempotency-key", key) for key in (b"", b"a b", b"k" * 256, b"\xe9", b"canary-key")),
    *((b"last-event-id", value) for value in (b"0", b"1.89abcdef", b"x", b"9" * 20, b"\xb2")),
    *((b"x-request-id", value) for value in (b"", b"id", b"canary id", b"r" * 129, b"\xff")),
    *((b"accept", b"text/event-stream"), (b"accept", b"\xff"), (b"accept-encoding", b"gzip, br")),
    *((b"traceparent", b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01"), (b"traceparent", b"\xff")),
    *((b"cookie", b"canary=canary-cookie"), (b"authorization", b"Bearer canary-token")),
    *((b"x-api-key", key) for key in (b"canary-token", b"", b"\xff")),
    *((b"content-encoding", b"gzip"), (b"expect", b"200-ok"), (b"x-canary", b"\x80" * 100)),
)
CONTENT_TYPES: tuple[bytes, ...] = (
    *(b"application/json; charset=utf-8", b"Application/JSON", b"application/json;", b""),
    *(b"text/plain", b"application/json, text/html", b"application/\xff"),
)
QUERIES: tuple[str, ...] = (
    *("canary-query", "starting_after=0", "starting_after=1.89abcdef", "starting_after=x"),
    *("%00=%ff", "a" * 2_000, "stream=true&stream=false", "starting_after=%C2%B2", "&&=;"),
)
