"""Trains the demo model on two cores, from exercises it draws as it goes."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from models.training.attention import TRAINING_ATTENTION, register_training_attention
from models.training.batches import Batch, batches
from models.training.tokenizer import BOS_ID, END_ID, MAX_CONTEXT, PAD_ID, VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what comes out."""

    seed: int = 0
    num_steps: int = 4200
    num_tokens_per_step: int = 3072
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    num_warmup_steps: int = 100
    long_share: float = 0.03


def build_model(seed: int) -> LlamaForCausalLM:
    """An untrained Llama of 3.5 million parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=5,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=MAX_CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=BOS_ID,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
    )


def train(
    model: LlamaForCausalLM,
    recipe: Recipe,
    *,
    report: Callable[[int], None],
    report_every: int,
) -> None:
    """Runs the recipe on `model`; calls `report(step)` now and then, with the model as it is."""
    register_training_attention()
    model.set_attn_implementation(TRAINING_ATTENTION)
    optimizers = _optimizers(model, recipe)
    source = batches(recipe.seed, recipe.num_tokens_per_step, recipe.long_share)
    progress = _Progress(recipe.num_steps)
    model.train()
    for step in range(1, recipe.num_steps + 1):
        factor = _schedule(step, recipe)
        batch = next(source)
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
    """Makes every weight a number that bfloat16 can hold; the model stays in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms.

    With AdamW alone the same accuracy takes about twice the steps.
    """
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


def _schedule(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    warmup = min(1.0, step / recipe.num_warmup_steps)
    return warmup * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / recipe.num_steps)))


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The mean cross-entropy of the answers' tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        is_learned = batch.labels >= 0
        logits = model.lm_head(hidden[is_learned])
    return functional.cross_entropy(logits.float(), batch.labels[is_learned])


class _Progress:
    """Prints a line about every ten seconds."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._started_s = self._printed_s = time.monotonic()
        self._losses: list[float] = []
        self._num_tokens = 0

    def add(self, step: int, loss: float, num_tokens: int) -> None:
        self._losses.append(loss)
        self._num_tokens += num_tokens
        now_s = time.monotonic()
        if now_s - self._printed_s < 10 and step < self._num_steps:
            return
        mean_loss = sum(self._losses) / len(self._losses)
        tokens_per_s = self._num_tokens / (now_s - self._printed_s)
        eta_min = (now_s - self._started_s) / step * (self._num_steps - step) / 60
        print(
            f"step {step}/{self._num_steps}  loss {mean_loss:.4f}  "
            f"{tokens_per_s:.0f} tokens/s  ETA {eta_min:.1f} min",
            flush=True,
        )
        self._printed_s, self._losses, self._num_tokens = now_s, [], 0
