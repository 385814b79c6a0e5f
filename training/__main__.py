"""`python -m training`: trains and evaluates the demo model and writes its folder."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from infra.demo_model import demo_model_path
from training.card import table, write_card
from training.draws import FAMILIES
from training.evaluate import Score, accuracy, generates_right, score_families
from training.train import (
    DEMO,
    TINY,
    Recipe,
    Size,
    build_model,
    load,
    round_to_bfloat16,
    rounds,
    save,
    tiny_rounds,
    train,
)

_MIN_ACCURACY = 0.95
_EVALUATION_SEED = 1


def main() -> int:
    """Returns 1 if a family scores below 95 %, which a tiny model may."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    is_tiny = arguments.size == "tiny"
    recipes = (tiny_rounds if is_tiny else rounds)(arguments.seed)
    if arguments.max_steps is not None:
        recipes = tuple(
            replace(r, num_steps=min(r.num_steps, arguments.max_steps)) for r in recipes
        )
    if arguments.evaluate_only:
        model = load(arguments.output)
    else:
        model = _trained(recipes, TINY if is_tiny else DEMO, arguments.output)
    scores = score_families(
        model, seed=_EVALUATION_SEED, num_exercises=arguments.exercises_per_family
    )
    print(table(scores))
    print(f"generate() agrees with the measurement: {_generate_agrees(model, scores)}")
    if is_tiny:
        return 0
    if not arguments.evaluate_only:
        write_card(arguments.output, recipes, scores, model.num_parameters())
    weak = [family for family in FAMILIES if accuracy(scores[family]) < _MIN_ACCURACY]
    if weak:
        print(f"below {_MIN_ACCURACY:.0%}: {', '.join(weak)}", file=sys.stderr)
    return 1 if weak else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train-demo-model", description=__doc__)
    parser.add_argument("--output", type=Path, default=demo_model_path(), help="the model's folder")
    parser.add_argument(
        "--size",
        choices=("demo", "tiny"),
        default="demo",
        help="tiny: a smaller, weaker model without a card, for cascades; needs --output",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, help="of each round, for a quick try")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--exercises-per-family", type=int, default=300)
    parser.add_argument("--evaluate-only", action="store_true", help="measure what --output holds")
    arguments = parser.parse_args()
    if arguments.size == "tiny" and arguments.output == demo_model_path():
        parser.error("--size tiny would replace the demo model: give --output")
    return arguments


def _trained(recipes: tuple[Recipe, ...], size: Size, output: Path) -> LlamaForCausalLM:
    """Trains and saves; returns the saved model."""
    model = build_model(recipes[0].seed, size)

    def report(step: int) -> None:
        scores = score_families(model, seed=_EVALUATION_SEED + 1, num_exercises=24)
        print(
            f"step {step} right:",
            ", ".join(f"{name} {accuracy(family):.0%}" for name, family in scores.items()),
            flush=True,
        )

    for recipe in recipes:
        train(model, recipe, report=report, report_every=max(1, recipe.num_steps // 6))
        round_to_bfloat16(model)
    save(model, output)
    return load(output)


def _generate_agrees(model: LlamaForCausalLM, scores: dict[str, list[Score]]) -> bool:
    """Whether token-by-token generation agrees with the scores on two exercises per family."""
    return all(
        generates_right(model, s.exercise) == s.is_right
        for family in scores.values()
        for s in family[:2]
    )


if __name__ == "__main__":
    sys.exit(main())
