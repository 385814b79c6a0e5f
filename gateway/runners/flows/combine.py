"""How an ensemble makes one answer of its members' answers. Knows no jobs."""

import sys
from array import array
from collections import Counter
from collections.abc import Sequence

from contract.events import ChoiceDelta, Prompt, Tokens
from contract.jobs import FinishReason


def vote(answers: Sequence[str]) -> int:
    """The index of the most frequent answer; of equals, the earliest. Answers that differ only in
    white space are the same. Raises ValueError if there is none."""
    words = [" ".join(answer.split()) for answer in answers]
    counts = Counter(words)
    return max(range(len(words)), key=lambda index: counts[words[index]])


def best(scores: Sequence[float]) -> int:
    """The index of the highest score; of equals, the earliest. NaN is lower than any number. Raises
    ValueError if there is none."""
    return max(
        range(len(scores)),
        key=lambda index: scores[index] if scores[index] == scores[index] else float("-inf"),
    )


def of_winners(
    outputs: Sequence[Sequence[Prompt | Tokens]], winners: Sequence[int], num_choices: int
) -> list[Prompt | Tokens]:
    """Joins an output in which each choice is its winner's. `winners`: indices in `outputs`, by
    choice. A prompt, which has `num_choices`, has the log probabilities of its first winner."""
    prompts, tokens = list[Prompt | Tokens](), list[Prompt | Tokens]()
    for index, output in enumerate(outputs):
        for event in output:
            if isinstance(event, Prompt):
                prompts += [event] if winners[event.prompt * num_choices] == index else []
                continue
            deltas = tuple(each for each in event.deltas if winners[each.choice] == index)
            tokens += [Tokens(deltas)] if deltas else []
    return prompts + tokens


def mean_output(outputs: Sequence[Sequence[bytes]]) -> Tokens:
    """The means of vectors, by input. Raises ValueError if they differ in number or length."""
    means = [mean(each) for each in zip(*outputs, strict=True)]
    deltas = (
        ChoiceDelta(i, 0, (), "", FinishReason.STOP, vector=vector)
        for i, vector in enumerate(means)
    )
    return Tokens(tuple(deltas))


def mean(vectors: Sequence[bytes]) -> bytes:
    """The mean of vectors of one length, element by element, not normalised. Vectors are of float32
    in little-endian order, as the result. Raises ValueError if there is none, or lengths differ.
    """
    if not vectors or len({len(vector) for vector in vectors}) > 1:
        raise ValueError("the members' vectors differ in length")
    columns = zip(*(_numbers(vector) for vector in vectors), strict=True)
    return _swapped(array("f", (sum(column) / len(vectors) for column in columns))).tobytes()


def _numbers(vector: bytes) -> "array[float]":
    numbers = array("f")
    numbers.frombytes(vector)  # ValueError, unless it is a multiple of four bytes
    return _swapped(numbers)


def _swapped(numbers: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
