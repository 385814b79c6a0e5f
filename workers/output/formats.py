"""How models write reasoning and tool calls: data, with vLLM's names where vLLM has one."""

from msgspec.structs import replace

from contract.output_formats import ReasoningFormat, ToolFormat

# Models that write the same marks, with the white space around them that each writes.
_THINK_LINES = (
    "qwen3", "deepseek_r1", "minimax_m2", "nemotron_v3", "step3", "step3p5", "olmo3",
)  # fmt: skip
_THINK = ("deepseek_v3", "glm45", "kimi_k2", "holo2")


def _formats() -> list[ReasoningFormat]:
    return [
        *(
            ReasoningFormat(name=name, open="<think>\n", close="\n</think>\n\n")
            for name in _THINK_LINES
        ),
        *(ReasoningFormat(name=name, open="<think>", close="</think>") for name in _THINK),
        ReasoningFormat(
            name="ernie45",
            open="<think>\n",
            close="\n</think>\n\n",
            before_answer="<response>\n",
            before_first_answer="<response>\n",
            after_answer="\n</response>",
        ),
        ReasoningFormat(
            name="hunyuan_a13b",
            open="<think>\n",
            close="\n</think>\n",
            before_answer="<answer>\n",
            before_first_answer="<answer>\n",
            after_answer="\n</answer>",
        ),
        ReasoningFormat(
            name="openai_gptoss",
            open="<|channel|>analysis<|message|>",
            close="<|end|>",
            before_answer="<|start|>assistant<|channel|>final<|message|>",
            before_first_answer="<|channel|>final<|message|>",
            before_call="<|start|>assistant",
            is_harmony=True,
        ),
        ReasoningFormat(name="mistral", open="[THINK]", close="[/THINK]"),
        ReasoningFormat(name="seed_oss", open="<seed:think>", close="</seed:think>\n"),
        ReasoningFormat(name="gemma4", open="<|channel>thought\n", close="\n<channel|>"),
        *(
            ReasoningFormat(
                name="cohere_command",
                open="<|START_THINKING|>",
                close="<|END_THINKING|>",
                before_answer=f"<|START_{part}|>",
                before_first_answer=f"<|START_{part}|>",
                after_answer=f"<|END_{part}|>",
            )
            for part in ("RESPONSE", "TEXT")
        ),
        ReasoningFormat(
            name="granite",
            open="Here is my thought process:",
            close="Here is my response:",
        ),
        ReasoningFormat(name="minimax_m3", open="<mm:think>", close="</mm:think>"),
        ReasoningFormat(name="hy3", open="<think:opensource>", close="</think:opensource>"),
        ReasoningFormat(
            name="apriel",
            open="Here are my reasoning steps:\n",
            close="\n[BEGIN FINAL RESPONSE]\n",
            after_answer="\n[END FINAL RESPONSE]",
        ),
        ReasoningFormat(
            name="kimi_k3",
            open="<|open|>think<|sep|>",
            close="<|close|>think<|sep|>",
            before_answer="<|open|>response<|sep|>",
            before_first_answer="<|open|>response<|sep|>",
            after_answer="<|close|>response<|sep|><|close|>message<|sep|>",
        ),
        ReasoningFormat(
            name="solar_open",
            open="<|think|>",
            close="<|end|>",
            before_answer="<|begin|>assistant<|content|>",
            before_first_answer="<|content|>",
            before_call="<|begin|>assistant",
        ),
    ]


REASONING_FORMATS: tuple[ReasoningFormat, ...] = tuple(_formats())
"""Some models of one name have formats of their own: the chat template tells which."""


_QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    syntax="tags",
    open="<tool_call>\n<function=",
    middle=">\n",
    key_open="<parameter=",
    key_close=">\n",
    value_close="\n</parameter>\n",
    close="</function>\n</tool_call>",
    between="\n",
)
_GLM45 = ToolFormat(
    name="glm45",
    syntax="tags",
    open="<tool_call>",
    middle="\n",
    key_open="<arg_key>",
    key_close="</arg_key>\n<arg_value>",
    value_close="</arg_value>\n",
    close="</tool_call>",
    between="\n",
)


def _list(name: str, begin: str, end: str, id_key: str = "") -> ToolFormat:
    """A JSON list of objects between marks."""
    return ToolFormat(name=name, begin=f"{begin}[", between=", ", end=f"]{end}", id_key=id_key)


def _invoke(name: str, namespace: str, group: str, key_close: str) -> ToolFormat:
    """Tags with attributes, in a group."""
    return ToolFormat(
        name=name,
        syntax="tags",
        begin=f"<{namespace}{group}>\n",
        open=f'<{namespace}invoke name="',
        middle='">\n',
        key_open=f'<{namespace}parameter name="',
        key_close=key_close,
        value_close=f"</{namespace}parameter>\n",
        close=f"</{namespace}invoke>",
        between="\n",
        end=f"\n</{namespace}{group}>",
    )


def _objects(name: str, opening: str, close: str, between: str = "\n") -> ToolFormat:
    """A JSON object between marks, for each call."""
    return ToolFormat(name=name, open=opening, close=close, between=between)


TOOL_FORMATS: tuple[ToolFormat, ...] = (
    # JSON objects between marks.
    _objects("hermes", "<tool_call>\n", "\n</tool_call>"),
    _objects("longcat", "<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    _objects("granite-20b-fc", "<function_call> ", "", " "),
    _objects("internlm", "<|action_start|><|plugin|>\n", "<|action_end|>"),
    _objects("gigachat3", "<|function_call|>", "", ""),
    ToolFormat(
        name="gigachat3",
        begin="<|message_sep|>\n\n",
        open="function call<|role_sep|>\n",
        between=None,
    ),
    ToolFormat(name="minimax_m1", begin="<tool_calls>\n", between="\n", end="\n</tool_calls>"),
    # JSON lists.
    _list("mistral", "[TOOL_CALLS]", "", id_key="id"),
    _list("granite", "<|tool_call|>", ""),
    _list("jamba", "<tool_calls>", "</tool_calls>"),
    _list("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _list("phi4_mini_json", "functools", ""),
    ToolFormat(
        name="cohere_command",
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
        name_key="tool_name",
        arguments_key="parameters",
        id_key="tool_call_id",
        id_first=True,
    ),
    ToolFormat(
        name="cohere_command",
        begin="Action:\n```json\n[\n",
        between=",\n",
        end="\n]```",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    ToolFormat(
        name="apertus",
        syntax="json",
        begin="<|tools_prefix|>[",
        open='{"',
        middle='": ',
        close="}",
        between=", ",
        end="]<|tools_suffix|>",
    ),
    # Nothing marks these: a JSON object, a JSON list, a Python list.
    ToolFormat(name="llama3_json", arguments_key="parameters", between="; "),
    _list("xlam", "", ""),
    ToolFormat(name="pythonic", syntax="python", between=", "),
    ToolFormat(
        name="lfm2",
        syntax="python",
        begin="<|tool_call_start|>",
        between=", ",
        end="<|tool_call_end|>",
    ),
    # A name, then JSON.
    ToolFormat(
        name="mistral",
        syntax="json",
        open="[TOOL_CALLS]",
        middle="[CALL_ID]{id}[ARGS]",
        id_length=9,
    ),
    ToolFormat(name="mistral", syntax="json", open="[TOOL_CALLS]", middle="[ARGS]"),
    ToolFormat(
        name="deepseek_v3",
        syntax="json",
        begin="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        close="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="deepseek_v31",
        syntax="json",
        begin="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        close="<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="kimi_k2",
        syntax="json",
        begin="<|tool_calls_section_begin|>",
        open="<|tool_call_begin|>functions.",
        middle=":{id}<|tool_call_argument_begin|>",
        close="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    ToolFormat(
        name="solar_open",
        syntax="json",
        begin="<|tool_calls|>",
        open="<|tool_call:begin|>{id}<|tool_call:name|>",
        middle="<|tool_call:args|>",
        close="<|tool_call:end|>",
        end="<|calls|>",
    ),
    ToolFormat(
        name="functionary", syntax="json", open="<function=", middle=">", close="</function>"
    ),
    # Its parser reads the channels: see harmony.py.
    ToolFormat(
        name="openai",
        syntax="json",
        open="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        close="<|call|>",
        between=None,
    ),
    # Tags.
    _QWEN3_CODER,
    replace(_QWEN3_CODER, name="step3p5", between=""),
    replace(
        _QWEN3_CODER,
        name="seed_oss",
        open="<seed:tool_call>\n<function=",
        key_close=">",
        value_close="</parameter>\n",
        close="</function>\n</seed:tool_call>",
    ),
    _GLM45,
    replace(
        _GLM45,
        name="glm47",
        middle="",
        key_close="</arg_key><arg_value>",
        value_close="</arg_value>",
        between="",
    ),
    ToolFormat(
        name="hy3",
        syntax="tags",
        begin="<tool_calls:opensource>\n",
        open="<tool_call:opensource>",
        middle="<tool_sep:opensource>\n",
        key_open="<arg_key:opensource>",
        key_close="</arg_key:opensource>\n<arg_value:opensource>",
        value_close="</arg_value:opensource>\n",
        close="</tool_call:opensource>",
        between="\n",
        end="\n</tool_calls:opensource>",
    ),
    _invoke("minimax_m2", "", "minimax:tool_call", '">'),
    _invoke("deepseek_v32", "｜DSML｜", "function_calls", '" string="{type}">'),
    _invoke("deepseek_v4", "｜DSML｜", "tool_calls", '" string="{type}">'),
    ToolFormat(
        name="minicpm5",
        syntax="tags",
        open='<function name="',
        middle='">',
        key_open='<param name="',
        key_close='">',
        value_close="</param>",
        close="</function>",
        between="\n",
        has_cdata=True,
    ),
    ToolFormat(
        name="kimi_k3",
        syntax="tags",
        begin="<|open|>tools<|sep|>",
        open='<|open|>call tool="',
        middle='" index="{id}"<|sep|>',
        key_open='<|open|>argument key="',
        key_close='" type="{type}"<|sep|>',
        value_close="<|close|>argument<|sep|>",
        close="<|close|>call<|sep|>",
        end="<|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    ToolFormat(
        name="gemma4", syntax="gemma", open="<|tool_call>call:", close="<tool_call|>", between=""
    ),
)
"""Some models of one name have formats of their own: the chat template tells which."""
