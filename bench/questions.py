"""Questions of general knowledge for a real model: with four choices, and without.

`python -m bench.questions` prints some for `batchway cascade fit`.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """A question with one right answer among four; the right one comes first."""

    text: str
    choices: tuple[str, str, str, str]


def _read(table: str) -> tuple[Question, ...]:
    """One question a line: its text, a question mark, and four choices."""
    found = []
    for line in table.strip().splitlines():
        text, _, choices = line.partition("? ")
        first, second, third, fourth = choices.split(", ")
        found.append(Question(text + "?", (first, second, third, fourth)))
    return tuple(found)


QUESTIONS = _read(
    """
What is the capital of France? Paris, London, Rome, Berlin
What is the capital of Japan? Tokyo, Beijing, Seoul, Bangkok
What is the capital of Egypt? Cairo, Nairobi, Tunis, Lagos
Which planet is closest to the Sun? Mercury, Venus, Mars, Saturn
Which planet is known as the Red Planet? Mars, Jupiter, Venus, Neptune
What is the largest ocean on Earth? Pacific, Atlantic, Indian, Arctic
What is the largest planet of the solar system? Jupiter, Saturn, Earth, Mars
Which gas do plants take from the air? carbon dioxide, oxygen, nitrogen, helium
What do bees make? honey, milk, silk, wool
Which animal is known as the king of the jungle? lion, rabbit, horse, frog
How many legs does a spider have? eight, six, four, ten
How many days are in a week? seven, five, six, ten
How many continents are there? seven, five, nine, three
Which metal is liquid at room temperature? mercury, iron, gold, copper
What is the chemical symbol of water? H2O, CO2, NaCl, O2
Who wrote Romeo and Juliet? William Shakespeare, Charles Dickens, Mark Twain, Jane Austen
Who painted the Mona Lisa? Leonardo da Vinci, Vincent van Gogh, Pablo Picasso, Claude Monet
Who developed the theory of relativity? Albert Einstein, Isaac Newton, Charles Darwin, Marie Curie
Which organ pumps blood through the body? heart, liver, lung, stomach
What is the hardest natural substance? diamond, wood, glass, chalk
Which language is spoken in Brazil? Portuguese, German, Russian, Japanese
Which country has the shape of a boot? Italy, Spain, Norway, Poland
On which continent is Kenya? Africa, Europe, Asia, Australia
What is frozen water called? ice, steam, fog, sand
Which season follows winter? spring, summer, autumn, night
What colour do blue and yellow make? green, red, white, black
Which instrument has black and white keys? piano, drum, flute, violin
Which animal gives us wool? sheep, cow, snake, duck
What do caterpillars become? butterflies, frogs, birds, fish
Which star is nearest to the Earth? Sun, Sirius, Polaris, Vega
What is the opposite of hot? cold, warm, dry, bright
Which tool do you use to cut paper? scissors, hammer, spoon, brush
"""
)
# Answered in sentences.
PROMPTS = (
    *(question.text for question in QUESTIONS),
    "Write a short story about a dog who finds a lost key.",
    "Explain why the sky is blue to a child.",
    "Give three tips for sleeping well.",
    "Describe how bread is made, step by step.",
    "Write a polite letter that cancels a dentist's appointment.",
    "What should I pack for a week at the sea?",
    "Explain in simple words what a computer program is.",
    "Summarize the water cycle in four sentences.",
    "List five healthy breakfasts.",
    "Tell me about the history of the bicycle.",
    "How does a rainbow come about?",
    "Write a Python function that returns the sum of a list.",
    "Why do leaves change their colour in autumn?",
    "Write a product description for a wooden chair.",
    "What are the advantages of public transport?",
    "Repeat this list twice, one item a line: apples, pears, plums, cherries, grapes.",
    "Correct this sentence and repeat it: She go to school every days with her brother.",
    "Write an invitation to a birthday party on Saturday at three in the garden.",
)


def data(num_sums: int) -> Iterator[dict[str, Any]]:
    """For `batchway cascade fit`: the questions with choices, as R answers them best, and sums of
    two numbers below 100, as the demo model has learnt them. A grammar leaves the choices."""
    for question in QUESTIONS:
        choices = [f" {choice}" for choice in question.choices]
        prompt = f"Question: {question.text}\nAnswer:"
        yield {"prompt": prompt, "guided_choice": sorted(choices), "answer": choices[0]}
    draw = random.Random(0)
    for _ in range(num_sums):
        a, b = draw.randrange(100), draw.randrange(100)
        wrong = draw.sample([a + b + n for n in (-11, -10, -1, 1, 10, 11) if a + b + n >= 0], 3)
        choices = [str(n) for n in (a + b, *wrong)]
        messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
        yield {"messages": messages, "guided_choice": sorted(choices), "answer": choices[0]}


if __name__ == "__main__":
    for row in data(num_sums=48):
        print(json.dumps(row))
