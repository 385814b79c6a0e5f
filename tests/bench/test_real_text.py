"""Measurements on real questions, with the demo model in place of SmolLM2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.questions import PROMPTS, QUESTIONS
from bench.real_text import main, paragraphs

pytestmark = pytest.mark.campaign

DEMO = Path(__file__).parents[2] / "infra/demo_model"


def table_of(text: str) -> list[dict[str, str]]:
    """The rows of the last table, by column."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.strip().splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_drafts_change_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Of questions and of paragraphs."""
    main(["speculation", f"--folder={DEMO}", "--chats", "3", "--rounds=1"])

    rows = table_of(capsys.readouterr().out)
    assert [row["chats"] for row in rows] == ["questions", "paragraphs"]
    assert [row["equal answers"] for row in rows] == ["3 of 3"] * 2


def test_the_callers_caps_fill_the_least_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """And preempt nothing."""
    main(["lengths", f"--folder={DEMO}", "--rounds=1", "--kv-mib=2"])

    predictions, admissions = map(table_of, capsys.readouterr().out.split("\n\n"))
    assert predictions[0]["known"] == "0 tokens"
    used = {row["admission by"]: float(row["mean KV occupancy"][:-1]) for row in admissions}
    assert min(used, key=used.__getitem__) == "the callers' caps"
    assert admissions[-1]["preemptions"] == "0"


def test_there_are_enough_texts() -> None:
    """For 32 chats of each kind and 50 schemas; a question's right choice is among those that
    `cascade fit` gets."""
    run = [sys.executable, "-m", "bench.questions"]
    lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(paragraphs()) >= 32
    assert len(PROMPTS) == len(set(PROMPTS)) == 50
    assert all(len({*question.choices}) == 4 for question in QUESTIONS)
    assert len(rows) > 50
    assert all(row["answer"] in row["guided_choice"] for row in rows)
