"""What `batchway up` prints once it serves: the address, and lines to copy."""

import json

_QUESTION = "Count from 1 to 10."  # the demo model knows the answer


def welcome(url: str, model: str, *, has_key: bool) -> str:
    """The text; names the variable of an API key, never the key."""
    messages = [{"role": "user", "content": _QUESTION}]
    body = json.dumps({"model": model, "temperature": 0, "messages": messages})
    header = ' -H "authorization: Bearer $BATCHWAY_API_KEY"' if has_key else ""
    key = 'os.environ["BATCHWAY_API_KEY"]' if has_key else '"none"'
    imports = "import openai, os" if has_key else "import openai"
    asked = f'model="{model}", temperature=0, messages={json.dumps(messages)}'
    return f"""
batchway is ready: {url} serves the model {model!r}

  curl {url}/v1/chat/completions{header} -H 'content-type: application/json' -d '{body}'

or in Python:

  {imports}; client = openai.OpenAI(base_url="{url}/v1", api_key={key})
  print(client.chat.completions.create({asked}).choices[0].message.content)

Ctrl-C ends it.
"""
