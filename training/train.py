"""Trains the demo model on two cores, on exercises drawn during training."""

import copy
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from training.attention import TRAINING_ATTENTION, register_training_attention
from training.batches import Batch, batches
from training.documents import Holes
from training.tokenizer import BOS_ID, END_ID, MAX_CONTEXT, PAD_ID, VOCAB_SIZE, save_tokenizer

_END_WEIGHT = 5.0
_FIRST_HOLES = Holes(whole_share=0.02)
_ROPE_THETA = 1e6


@dataclass(frozen=True, slots=True)
class Recipe:
    """All parameters of the training.

    The first `short_phase` uses only short documents, later every second batch does: copying and
    sums are learned there much sooner than among long counts.
    """

    seed: int = 0
    num_steps: int = 5_600
    num_tokens_per_step: int = 4096
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    num_warmup_steps: int = 50
    short_phase: float = 0.25
    holes: Holes = _FIRST_HOLES


def rounds(seed: int) -> tuple[Recipe, ...]:
    """The whole training: all exercises, then the difficult ends of long counts. Weights are
    rounded to bfloat16 after each round.

    After the first round one error remains: a long count stops at a number that differs from its
    last only in the hundreds. Documents with holes rarely show that place.
    """
    return Recipe(seed=seed), Recipe(
        seed=seed + 2,
        num_steps=1_800,
        learning_rate=1e-3,
        short_phase=0.0,
        holes=Holes(whole_share=0.1, near_miss_share=0.4),
    )


@dataclass(frozen=True, slots=True)
class Size:
    """The width, depth and attention heads of a model. Heads have 32 dimensions."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


DEMO = Size(hidden=128, intermediate=384, num_layers=5, num_heads=4, num_kv_heads=2)
TINY = Size(hidden=64, intermediate=192, num_layers=2, num_heads=2, num_kv_heads=1)


def tiny_rounds(seed: int) -> tuple[Recipe, ...]:
    """The training of a smaller model that is sometimes wrong, as a cascade's first member is."""
    return (Recipe(seed=seed, num_steps=4_000),)


def build_model(seed: int, size: Size = DEMO) -> LlamaForCausalLM:
    """An untrained Llama, of one million parameters in the demo's size; its layers initially add
    nothing."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_kv_heads,
            head_dim=32,
            max_position_embeddings=MAX_CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
            tie_word_embeddings=True,
            bos_token_id=BOS_ID,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def train(
    model: LlamaForCausalLM,
    recipe: Recipe,
    *,
    report: Callable[[int], None],
    report_every: int,
) -> None:
    """Trains `model`; calls `report(step)` now and then."""
    register_training_attention()
    model.set_attn_implementation(TRAINING_ATTENTION)
    optimizers = _optimizers(model, recipe)
    num_tokens = recipe.num_tokens_per_step
    short = batches(recipe.seed, num_tokens, Holes(0.0), max_document_tokens=64)
    mixed = batches(recipe.seed + 1, num_tokens, recipe.holes)
    progress = _Progress(recipe)
    model.train()
    for step in range(1, recipe.num_steps + 1):
        done = progress.share_done(step)
        if done >= 1:
            break
        factor = min(1.0, step / recipe.num_warmup_steps, 0.01 + 1.6 * (1 - done))
        is_short = done < recipe.short_phase or step % 2 == 0
        batch = next(short if is_short else mixed)
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.add(step, float(loss.detach()), batch.token_ids.numel())
        if step % report_every == 0:
            model.train(False)
            report(step)
            model.train()
    model.train(False)


def round_to_bfloat16(model: LlamaForCausalLM) -> None:
    """Rounds every weight to a bfloat16 value; the model stays in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms. AdamW alone needs about three
    times the steps."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    lr = recipe.learning_rate
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            inner, lr=lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = lr
    return optimizers


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens. The end token weighs more: it is the hard part of
    a count, but only a hundredth of the loss."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        is_learned = batch.labels >= 0
        logits = model.lm_head(hidden[is_learned])
    labels = batch.labels[is_learned]
    losses = functional.cross_entropy(logits.float(), labels, reduction="none")
    weights = torch.where(labels == END_ID, _END_WEIGHT, 1.0)
    return (losses * weights).sum() / weights.sum()


class _Progress:
    """Tracks progress and prints a line about every ten seconds."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._started_s = self._printed_s = time.monotonic()
        self._losses: list[float] = []
        self._num_tokens = 0

    def share_done(self, step: int) -> float:
        return (step - 1) / self._recipe.num_steps

    def add(self, step: int, loss: float, num_tokens: int) -> None:
        self._losses.append(loss)
        self._num_tokens += num_tokens
        now_s = time.monotonic()
        if now_s - self._printed_s < 10 and step < self._recipe.num_steps:
            return
        mean_loss = sum(self._losses) / len(self._losses)
        tokens_per_s = self._num_tokens / (now_s - self._printed_s)
        share = self.share_done(step + 1)
        eta_min = (now_s - self._started_s) / 60 * (1 - share) / share
        print(
            f"step {step}/{self._recipe.num_steps}  loss {mean_loss:.4f}  "
            f"{tokens_per_s:.0f} tokens/s  ETA {eta_min:.1f} min",
            flush=True,
        )
        self._printed_s, self._losses, self._num_tokens = now_s, [], 0


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes weights in bfloat16, configuration and tokenizer; each file atomically."""
    half = copy.deepcopy(model).to(torch.bfloat16)  # type: ignore[arg-type]
    half.set_attn_implementation("sdpa")
    half.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        half.save_pretrained(scratch)
        save_tokenizer(Path(scratch))
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            shutil.move(path, folder / path.name)


def load(folder: Path) -> LlamaForCausalLM:
    """The saved model in float32, the precision of the evaluation."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    model.train(False)
    return model
