"""How models write their reasoning: data, with vLLM's names where vLLM has one."""

from contract.output_formats import ReasoningFormat

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
