"""DSPy. The demo model does not follow DSPy's formats, so that only its language model is used."""

import importlib.metadata

import dspy
from exercises import (
    BASE_URL,
    KEY,
    MODEL,
    QUESTION,
    RESPONSE_FORMAT,
    SUM,
    fits,
    main,
    says,
    works,
    works_on_demo,
)

OPTIONS = {"api_base": BASE_URL, "api_key": KEY, "temperature": 0.0, "cache": False}
chat = dspy.LM(f"openai/{MODEL}", num_retries=0, **OPTIONS)
text = dspy.LM(f"openai/{MODEL}", model_type="text", num_retries=0, max_tokens=5, **OPTIONS)


def first(answers):
    answer = answers[0]
    return answer["text"] if isinstance(answer, dict) else answer


@works("chat")
def whole():
    says(first(chat(messages=[{"role": "user", "content": QUESTION}])))


@works_on_demo("completion")
def completion():
    assert isinstance(first(text("1, 2, 3,")), str)


@works_on_demo("Predict (request taken; the demo model follows no format)")
def predict():
    with dspy.context(lm=chat, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        try:
            dspy.Predict("question -> answer")(question=QUESTION)
        except dspy.utils.exceptions.AdapterParseError:
            pass


@works("structured output")
def structured():
    fits(first(chat(SUM, response_format=RESPONSE_FORMAT)))


main(importlib.metadata.version("dspy"))
