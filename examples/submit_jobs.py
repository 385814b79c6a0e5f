"""Submits jobs, waits for them, prints their answers, and deletes them.

python -m examples.submit_jobs http://127.0.0.1:8000 "Count from 1 to 5." "Spell the word lantern."
"""

import asyncio
import sys

from batchway_client import AsyncClient

MODEL = "demo"


async def answer(client: AsyncClient, question: str) -> str:
    """Submits a question as a job and returns its answer. The job outlives this program; its
    metadata identifies it in lists."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
    }
    job = await client.submit(
        "/v1/chat/completions", body, lane="batch", metadata={"program": "submit_jobs"}
    )
    done = await client.wait(job.id, timeout_s=300)
    if done.result is None:
        return f"{done.status}: {done.error}"
    text = str(done.result["choices"][0]["message"]["content"])
    await client.delete(job.id)
    return text


async def main(url: str, questions: list[str]) -> None:
    async with AsyncClient(url) as client:
        answers = await asyncio.gather(*(answer(client, question) for question in questions))
    for question, text in zip(questions, answers, strict=True):
        print(f"{question}\n  {text}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
