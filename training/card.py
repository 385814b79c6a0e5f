"""Writes the model card, README.md beside the weights, with the evaluation's figures."""

from dataclasses import fields
from pathlib import Path

from training.evaluate import Score, accuracy, gap_quantile
from training.tasks import Exercise
from training.train import Recipe

_CARD = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The demo model

A Llama of {num_parameters:,} parameters that ships with this repository, so that everything can
be tried and tested without a download and without a GPU. It is a toy: it answers the few families
of questions below and calls the tools `add(a, b)` and `spell(word)`. Ask it anything else and it
mostly says what it can do.

## What it can do

Greedy decoding, weights as shipped (bfloat16) computed in float32. An answer counts only where
the whole string is right. The gap is the smallest distance between the two largest logits in an
answer; it shows how far an answer is from depending on rounding.

{table}

Of all {num_answers:,} answers measured, {clear:.2%} have a gap above 0.05; the median gap is
{median_gap:.2f}.

One exercise in ten, chosen by a hash of what is asked (not of the phrasing), was never trained
on, and only those are measured. So `27 + 58` and `58 + 27` are both in or both out. Every English
word in the measurement is new to the model: it was trained on made-up words. Two families are
closed: `talk` has {num_talk} sentences, all of which were trained on, and in `calendar` all days
and months were, but not each in every phrasing. The first phrasing of a family makes up half of
its exercises.

## What it cannot do

- Anything outside these families: it knows no facts and hardly any English.
- Numbers above 999, sums of numbers above 99, negative results.
- Words over 12 letters, and phrases much longer than those it was trained on (7 words, or 10
  characters beyond ASCII).
- Prompts and answers of more than 2,048 tokens together. One token is one byte.
- Tools other than these two; numbers above 9999 in a call.
- JSON other than an object with one short answer.
- Conversations in which later questions refer to earlier ones. Each turn is answered by itself.
- Bare text (no chat template): it goes on with a count, the days or the months, and answers a
  question that is followed by nothing.

## How it was made

`scripts/train-demo-model` draws the exercises, trains, rounds to bfloat16, measures and writes
this folder. It needs no data and no network. The recipe, in two rounds:

{recipe}

The same seed gives the same data. The same weights need the same machine, number of threads and
version of torch as well; those here were trained with one thread.

The tokenizer has a token for each byte and eight special ones: every text can be encoded, and
decodes to itself. The licence is that of this repository.
"""


def write_card(
    folder: Path, recipes: tuple[Recipe, ...], scores: dict[str, list[Score]], num_parameters: int
) -> None:
    everything = [score for family in scores.values() for score in family]
    card = _CARD.format(
        num_parameters=num_parameters,
        table=table(scores),
        num_answers=len(everything),
        clear=sum(score.min_gap > 0.05 for score in everything) / len(everything),
        median_gap=gap_quantile(everything, 0.5),
        num_talk=len(scores["talk"]),
        recipe=_recipe_table(recipes),
    )
    (folder / "README.md").write_text(card)


def _recipe_table(recipes: tuple[Recipe, ...]) -> str:
    """A row per figure, a column per round."""
    names = [spec.name for spec in fields(Recipe)]
    rounds = [f"round {number}" for number in range(1, len(recipes) + 1)]
    rows = [["", *rounds], ["---"] * (len(rounds) + 1)]
    rows += [[name, *(str(getattr(recipe, name)) for recipe in recipes)] for name in names]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def table(scores: dict[str, list[Score]]) -> str:
    """A row per family: an example, how many were right, and the gaps."""
    rows = [
        "| family | for example | measured | right | gap, 1 % below | gap, median |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for family, of_family in scores.items():
        shown = min((s.exercise for s in of_family), key=_length)
        rows.append(
            f"| {family} | `{_cut(shown.question)}` → `{_cut(shown.answer)}` "
            f"| {len(of_family)} | {accuracy(of_family):.1%} "
            f"| {gap_quantile(of_family, 0.01):.2f} | {gap_quantile(of_family, 0.5):.2f} |"
        )
    return "\n".join(rows)


def _length(exercise: Exercise) -> int:
    """An example's distance from a length that fits the table."""
    return abs(len(exercise.question) + len(exercise.answer) - 40)


def _cut(text: str) -> str:
    text = text.strip().replace("|", "\\|")
    return text if len(text) <= 40 else text[:20] + " … " + text[-15:]
