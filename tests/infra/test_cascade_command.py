"""`batchway cascade fit`: the cheapest threshold that keeps quality, from questions or answers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.jobs import Endpoint
from infra.cli import main
from infra.measure.cascade import Question, read
from infra.measure.cascade_fit import (
    MIN_QUESTIONS,
    CannotFit,
    FirstAnswer,
    LastAnswer,
    Measured,
    fit_threshold,
)
from tests.loopback import Handler, running_server

CASCADE = """\
models:
- name: sure
  cascade:
    confidence: {}
    members: [{{model: small, threshold: 1}}, {{model: large}}]
"""


def row(
    confidence: float, first: float, last: float = 1.0, costs: tuple[float, float] = (1, 10)
) -> Measured:
    return Measured(
        first=FirstAnswer(confidence=confidence, quality=first, cost=costs[0]),
        last=LastAnswer(quality=last, cost=costs[1]),
    )


def calibrated(num: int = 100) -> list[Measured]:
    """The first member is right exactly where its confidence is 0.5 or more."""
    return [row(i / num, float(i >= num / 2)) for i in range(num)]


def test_the_cheapest_threshold_that_keeps_the_target_is_chosen() -> None:
    """Half the questions need the last member; a little less quality saves a little more."""
    fit = fit_threshold(calibrated(), target=1.0, seed=0)
    assert fit.chosen is not None
    assert fit.chosen.threshold == pytest.approx(0.495)
    assert fit.chosen.first_share == 0.5
    assert fit.chosen.quality == 1.0
    assert fit.chosen.cost == pytest.approx((100 * 1 + 50 * 10) / 1000)
    cheaper = fit_threshold(calibrated(), target=0.9, seed=0).chosen
    assert cheaper is not None
    assert cheaper.first_share == 0.6
    assert cheaper.quality == pytest.approx(0.9)


def test_the_curve_ends_with_the_first_member_alone() -> None:
    """At threshold 0, which every confidence reaches."""
    *_, alone = fit_threshold(calibrated(), target=1.0, seed=0).curve
    assert (alone.threshold, alone.first_share, alone.quality, alone.cost) == (0.0, 1.0, 0.5, 0.1)


def test_quality_is_relative_to_the_last_member() -> None:
    """Also above it, where the first member knows what the last does not."""
    rows = [row(0.9, 1.0, last=0.0), row(0.1, 0.0, last=1.0)] * 50
    fit = fit_threshold(rows, target=1.5, seed=0)
    assert fit.last_quality == 0.5
    assert fit.chosen is not None
    assert (fit.chosen.threshold, fit.chosen.quality) == (0.5, 2.0)


def test_uncertainty_is_said() -> None:
    """The interval holds the value, and narrows with more questions."""
    few = [row(i / 60, float(i % 4 > 0)) for i in range(60)]
    many = [row(i / 6000, float(i % 4 > 0)) for i in range(6000)]
    widths = []
    for rows in (few, many):
        fit = fit_threshold(rows, target=0.8, seed=0)
        assert fit.chosen is not None
        assert fit.quality_interval is not None
        assert fit.quality_interval.low <= fit.chosen.quality <= fit.quality_interval.high
        widths.append(fit.quality_interval.high - fit.quality_interval.low)
    assert widths[1] < widths[0] / 5


@pytest.mark.campaign
@settings(max_examples=30, deadline=None)  # each resamples a thousand times
@given(
    st.lists(
        st.builds(
            row,
            st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([0.0, 1.0]),
        ),
        min_size=MIN_QUESTIONS,
        max_size=MIN_QUESTIONS,
    )
)
def test_each_point_is_what_the_cascade_does(rows: list[Measured]) -> None:
    """An answer stands where its confidence reaches the threshold; counted by hand."""
    try:
        fit = fit_threshold(rows, target=0.9, seed=0)
    except CannotFit:
        return
    for point in fit.curve:
        stands = [one.first.confidence >= point.threshold for one in rows]
        right = [
            r.first.quality if s else r.last.quality for r, s in zip(rows, stands, strict=True)
        ]
        cost = sum(1 if s else 11 for s in stands)
        assert point.first_share == pytest.approx(sum(stands) / len(rows))
        assert point.quality == pytest.approx(sum(right) / sum(r.last.quality for r in rows))
        assert point.cost == pytest.approx(cost / (10 * len(rows)))
    keeping = [point.cost for point in fit.curve if point.quality >= 0.9]
    assert (min(keeping) if keeping else None) == (fit.chosen.cost if fit.chosen else None)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (calibrated(49), "49 questions are too few: give at least 50"),
        ([row(i / 60, 0.0, last=0.0) for i in range(60)], "answers no question right"),
        ([row(0.5, 1.0)] * 60, "equally sure of all its answers"),
    ],
)
def test_data_that_tell_nothing_are_refused(rows: list[Measured], fault: str) -> None:
    with pytest.raises(CannotFit, match=fault):
        fit_threshold(rows, target=0.98, seed=0)


class Models:
    """`small` knows numbers below 30, and is sure of those below 40; `large` knows all."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[Any] = []

    def answer(self, path: str, body: Any) -> tuple[int, object]:
        """The status and the data."""
        self.bodies.append(body)
        if path == "/v1/score":
            if not body["text_2"]:
                return 400, {"error": {"code": "invalid_value"}}
            return 200, {"data": [{"score": 0.9 if int(body["text_1"]) < 40 else 0.1}]}
        is_chat = "messages" in body
        number = int(body["messages"][0]["content"] if is_chat else body["prompt"])
        if number == 999:
            return 400, {"error": {"code": "bad", "message": f"{number} is secret"}}
        is_small = body["model"] == "small"
        sure = math.log(0.9 if number < 40 else 0.2)
        text = f" {number if not is_small or number < 30 else -1}\n"
        if body.get("response_format"):
            text = json.dumps({"is": int(text), "sure": math.exp(sure)})
        elif is_small and number == 38:
            text = ""
        choice: dict[str, Any] = {"text": text, "logprobs": {"token_logprobs": [sure] * 3}}
        if is_chat:
            tokens = [{"logprob": sure}] * 3
            choice = {"message": {"content": text}, "logprobs": {"content": tokens}}
        return 200, {"choices": [choice], "usage": {"total_tokens": 7}}


@pytest.fixture
def server() -> Iterator[Models]:
    models = Models()

    class Answers(Handler):
        def do_POST(self) -> None:
            status, data = models.answer(self.path, json.loads(self.body()))
            self.answer(status, json.dumps(data).encode())

    with running_server(Answers) as models.url:
        yield models


def fit(server: Models, folder: Path, kind: str, lines: list[Any], *more: str) -> int:
    """The exit status of the command on these questions; its JSON is in out.json."""
    (folder / "models.yaml").write_text(CASCADE.format(kind))
    (folder / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return main(
        [
            *("cascade", "fit", f"--data={folder / 'data.jsonl'}"),
            f"--models={folder / 'models.yaml'}",
            f"--base-url={server.url}/v1",
            *("--target-quality=0.9", f"--json={folder / 'out.json'}", *more),
        ]
    )


def chat(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": str(number)}], "answer": str(number)}


def completion(number: int) -> dict[str, Any]:
    return {"prompt": str(number), "answer": str(number), "max_tokens": 5}


def in_json(number: int) -> dict[str, Any]:
    return chat(number) | {"answer": {"is": number}, "response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("kind", "question"),
    [
        ("{by: mean_logprob}", chat),
        ("{by: quantile_logprob}", completion),
        ("{by: field, field: sure}", in_json),
        ("{by: scorer, scorer: rank}", completion),
    ],
    ids=["mean", "quantile", "field", "scorer"],
)
def test_members_are_asked_and_their_answers_measured(
    server: Models, tmp_path: Path, kind: str, question: Any
) -> None:
    """For each kind of confidence: 40 of 60 answers stand, 10 of them wrong."""
    questions = [question(number) for number in range(60)]
    assert fit(server, tmp_path, kind, questions, "--token-costs", "1", "10") == 1
    points = json.loads((tmp_path / "out.json").read_text())["curve"]
    assert [(round(p["first_share"], 3), round(p["quality"], 3)) for p in points] == [
        (0.667, 0.833),
        (1.0, 0.5),
    ]
    assert points[1]["cost"] == pytest.approx(0.1)


def test_measured_answers_are_saved_and_read_again(
    server: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file holds no text, and gives the same result without a server."""
    questions = [chat(number) for number in range(36)] + [chat(number) for number in range(40, 70)]
    saved, plot = tmp_path / "saved.jsonl", tmp_path / "out.png"
    costs = ("--token-costs", "1", "10")
    assert fit(server, tmp_path, "{}", questions, f"--save={saved}", *costs) == 0
    first = capsys.readouterr().out
    assert "66 questions" in first
    assert "* threshold 0.550000: 90.91% of the quality (95 % interval " in first
    assert json.loads(saved.read_text().splitlines()[0]) == {
        "first": {"confidence": pytest.approx(0.9), "quality": 1.0, "cost": 7.0},
        "last": {"quality": 1.0, "cost": 70.0},
    }

    again = ["cascade", "fit", f"--data={saved}", "--target-quality=0.9", f"--png={plot}"]
    assert main(again) == 0
    assert capsys.readouterr().out == first
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_before_a_refusal_is_saved(server: Models, tmp_path: Path) -> None:
    questions = [chat(number) for number in range(20)] + [chat(999)]
    saved = tmp_path / "saved.jsonl"
    more = (f"--save={saved}", "--max-concurrency=1")
    assert fit(server, tmp_path, "{}", questions, *more) == 1
    assert len(saved.read_text().splitlines()) == 20


def test_a_scorer_gets_what_the_cascade_would_send(server: Models, tmp_path: Path) -> None:
    """The last message of the user, and a space for an empty answer."""
    ended = {"messages": [{"role": "user", "content": "3"}, {"role": "assistant", "content": "so"}]}
    questions = [chat(number) for number in range(30, 80)] + [{**ended, "answer": "3"}]
    fit(server, tmp_path, "{by: scorer, scorer: rank}", questions)
    scored = [body for body in server.bodies if "text_1" in body]
    assert len(scored) == 51
    assert {"model": "rank", "text_1": "38", "text_2": " "} in scored
    assert {body["text_1"] for body in scored} >= {"3", "79"}


def test_a_question_is_asked_as_it_is(server: Models, tmp_path: Path) -> None:
    """With its other fields, greedily unless it says otherwise, and without the answer."""
    questions = [completion(number) | {"temperature": 0.5} for number in range(60)]
    fit(server, tmp_path, "{}", questions)
    bodies = [body for body in server.bodies if body["prompt"] == "7"]
    common = {"prompt": "7", "max_tokens": 5, "temperature": 0.5}
    assert {"model": "small", "logprobs": 1} | common in bodies
    assert {"model": "large"} | common in bodies


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([chat(1)], "1 questions are too few"),
        ([{"answer": "1"}], ":1: needs either `prompt` or `messages`"),
        ([chat(1), {"prompt": "1"}], ":2: `answer` must be the right text"),
        ([chat(1), {"first": {}}], ":2: Object missing required field `confidence`"),
        ([{"prompt": [1, 2], "answer": "x"}], ":1: `prompt` must be a text"),
        ([[]], ":1: must be an object"),
        ([completion(999)] * 60, "small refuses a question with 400 bad\n"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    server: Models,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[Any],
    fault: str,
) -> None:
    """With the line of the file; never with a question's text."""
    assert fit(server, tmp_path, "{}", lines) == 1
    told = capsys.readouterr().err
    assert fault in told
    assert "secret" not in told


def test_a_cascade_is_named_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And of questions, one is needed at all."""
    data, models = tmp_path / "data.jsonl", tmp_path / "models.yaml"
    data.write_text(json.dumps(chat(1)))
    assert main(["cascade", "fit", f"--data={data}"]) == 1
    assert "questions need --models" in capsys.readouterr().err
    two = CASCADE.format("{}") + CASCADE.format("{}").removeprefix("models:\n").replace("sure", "b")
    models.write_text(two)
    assert main(["cascade", "fit", f"--data={data}", f"--models={models}"]) == 1
    assert "give --flow with a cascade's name; its cascades are sure, b" in capsys.readouterr().err


@pytest.mark.campaign
def test_the_demo_models_held_out_questions_are_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.questions import main as write_questions

    monkeypatch.setattr("sys.argv", ["questions", "--per-family", "2"])
    write_questions()
    (tmp_path / "data.jsonl").write_text(capsys.readouterr().out)
    rows = [row for row in read(tmp_path / "data.jsonl") if isinstance(row, Question)]
    assert len(rows) > 20
    assert all(row.endpoint is Endpoint.CHAT and isinstance(row.answer, str) for row in rows)
