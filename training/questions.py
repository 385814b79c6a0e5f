"""`python -m training.questions`: questions that training held out, as data of `batchway cascade
fit`.

Chat alone: a grammar or a tool's result is no part of a question.
"""

import argparse
import json

from training.draws import FAMILIES
from training.evaluate import held_out

MAX_TOKENS = 1_024  # more than the longest answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.questions", description=__doc__)
    parser.add_argument("--per-family", type=int, default=60, help="(default: 60)")
    parser.add_argument("--seed", type=int, default=7, help="(default: 7)")
    arguments = parser.parse_args()
    for family in FAMILIES:
        for exercise in held_out(family, arguments.seed, arguments.per_family):
            if exercise.is_raw or exercise.tools or exercise.begun or not exercise.has_end:
                continue
            messages = [{"role": "user", "content": exercise.question}]
            row = {"messages": messages, "answer": exercise.answer, "max_tokens": MAX_TOKENS}
            print(json.dumps(row))


if __name__ == "__main__":
    main()
