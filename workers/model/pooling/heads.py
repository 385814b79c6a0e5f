"""The steps from the vectors of a text's tokens to its one vector."""

from collections.abc import Sequence as Seq
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from workers.engine.interface import ModelRefused
from workers.model.checkpoint import first_line
from workers.model.files import ModelFiles
from workers.model.pooling import folder
from workers.model.pooling.encoders import Text, runs_of_equal_length
from workers.model.transformers_compat import EncoderOutput

# Largest error of a logit in a half type, as a share of the largest logit.
_MAX_LOGIT_ERROR = 0.02


class PoolHead:
    """Pooling as sentence-transformers defines it; computed in float32."""

    def __init__(self, modes: Seq[str]) -> None:
        self._modes = modes

    def __call__(self, rows: Tensor, texts: Seq[Text]) -> Tensor:
        counts = [len(text.token_ids) for text in texts]
        lengths = torch.tensor(counts, device=rows.device)
        ends = lengths.cumsum(0)
        rows = rows.float()
        pooled = []
        for mode in self._modes:
            match mode:
                case "cls":
                    pooled.append(rows[ends - lengths])
                case "lasttoken":
                    pooled.append(rows[ends - 1])
                case "weightedmean":
                    weights = torch.cat([torch.arange(1, count + 1) for count in counts])
                    weighted = rows * weights.to(rows)[:, None]
                    sums = torch.segment_reduce(weighted, "sum", lengths=lengths)
                    pooled.append(sums / (lengths * (lengths + 1) / 2)[:, None])
                case "mean_sqrt_len_tokens":
                    sums = torch.segment_reduce(rows, "sum", lengths=lengths)
                    pooled.append(sums / lengths.sqrt()[:, None])
                case _:
                    pooled.append(torch.segment_reduce(rows, mode, lengths=lengths))
        return torch.cat(pooled, dim=1)


class ModelHead:
    """A model's own layers behind its encoder. They are computed by the model's forward, in which
    the encoder is replaced by its known output. Texts of equal length are computed in one call."""

    def __init__(self, model: Any, encoder: nn.Module, *, last_only: bool = False) -> None:
        """`last_only`: the head takes a text's last token alone."""
        self._model = model
        self._known = _KnownOutput(encoder)
        self._last_only = last_only
        # Such a classifier refuses several texts at once, because it might confuse them.
        self._is_alone = model.config.get_text_config().pad_token_id is None
        setattr(model, model.base_model_prefix, self._known)

    def __call__(self, rows: Tensor, texts: Seq[Text]) -> Tensor:
        lengths = [len(text.token_ids) for text in texts]
        if self._last_only:
            ends = torch.tensor(lengths, device=rows.device).cumsum(0)
            first_ids = torch.zeros(len(texts), 1, dtype=torch.long, device=rows.device)
            return self._logits(rows[ends - 1][:, None], first_ids)[:, -1]
        parts, done = [], 0
        for first, num_texts, length in runs_of_equal_length(lengths):
            ids = torch.tensor([list(t.token_ids) for t in texts[done : done + num_texts]])
            hidden = rows[first : first + num_texts * length].view(num_texts, length, -1)
            ids = ids.to(rows.device)
            num_each = 1 if self._is_alone else num_texts
            for start in range(0, num_texts, num_each):
                some = slice(start, start + num_each)
                parts.append(self._logits(hidden[some], ids[some]))
            done += num_texts
        return torch.cat(parts)

    def _logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self._known.hidden = hidden
        logits: Tensor = self._model(input_ids=ids).logits
        self._known.hidden = torch.empty(0)  # else the step's rows stay in memory
        return logits.float()


class _KnownOutput(nn.Module):
    """Stands for an encoder whose output is known. The encoder is kept outside of the modules."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        self._pooler = getattr(encoder, "pooler", None)
        self._pooler_activation = getattr(encoder, "pooler_activation", None)  # ALBERT's

    def forward(self, *_: Any, **__: Any) -> EncoderOutput:
        pooled = None
        if self._pooler is not None and self._pooler_activation is not None:
            pooled = self._pooler_activation(self._pooler(self.hidden[:, 0]))
        elif self._pooler is not None:
            pooled = self._pooler(self.hidden)
        return EncoderOutput(last_hidden_state=self.hidden, pooler_output=pooled)


class LogitHead:
    """A reranker's score: the logit of one token at the last position, less that of another. No
    other token's logit is computed, unless the model does more than multiply by its weights."""

    def __init__(self, model: Any, encoder: nn.Module, step: folder.LogitScore) -> None:
        self._token_ids = [step.true_id, *([] if step.false_id is None else [step.false_id])]
        linear = model.get_output_embeddings()  # requires the encoder in its place
        self._head: ModelHead | None = ModelHead(model, encoder, last_only=True)
        self._weights = torch.empty(0)  # (tokens of the score, H)
        if type(linear) is nn.Linear and linear.bias is None:
            weights = linear.weight[self._token_ids].float()
            # So large that a model which caps its logits would cap these.
            probes = 100 * torch.randn(
                8, linear.in_features, generator=torch.Generator().manual_seed(0)
            )
            expected = self._logits(probes.to(linear.weight), [Text([0])] * len(probes))
            error = (F.linear(probes.to(weights), weights) - expected).abs().max()
            if error <= _MAX_LOGIT_ERROR * expected.abs().max():
                self._head, self._weights = None, weights

    def __call__(self, rows: Tensor, texts: Seq[Text]) -> Tensor:
        logits = self._logits(rows, texts)
        return logits[:, :1] - logits[:, 1:].sum(dim=1, keepdim=True)

    def _logits(self, rows: Tensor, texts: Seq[Text]) -> Tensor:
        """(number of texts, tokens of the score)"""
        if self._head is not None:
            return self._head(rows, texts)[:, self._token_ids]
        lengths = torch.tensor([len(text.token_ids) for text in texts], device=rows.device)
        return F.linear(rows[lengths.cumsum(0) - 1].float(), self._weights)


class DenseLayer(nn.Module):
    """A Dense of sentence-transformers, with its weights, in float32. Raises ModelRefused."""

    def __init__(self, files: ModelFiles, step: folder.Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(step.num_in, step.num_out, bias=step.has_bias)
        if step.adds_input and step.num_in != step.num_out:
            self.residual = nn.Linear(step.num_in, step.num_out, bias=False)
        activation = getattr(nn, step.activation, None)
        if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
            raise ModelRefused(
                f"{files.model_path} has a Dense with {step.activation}, not torch's"
            )
        self._activation = activation()
        self._adds_input = step.adds_input
        file = files.find(f"{step.path}/model.safetensors")
        if file is None:
            raise ModelRefused(
                f"the Dense of {files.model_path} has no model.safetensors (pickled weights can "
                "run code and are never loaded)"
            )
        try:
            self.load_state_dict({name: t.float() for name, t in load_file(file).items()})
        except Exception as exc:  # the file is damaged, or has other tensors
            raise ModelRefused(
                f"the Dense of {files.model_path} cannot be loaded: {first_line(exc)}"
            ) from exc

    def forward(self, vectors: Tensor) -> Tensor:
        out: Tensor = self._activation(self.linear(vectors))
        if self._adds_input:
            residual = getattr(self, "residual", None)
            out = out + (vectors if residual is None else residual(vectors))
        return out


class Heads:
    """All steps of a folder, in order. They make (number of texts, H') of (T, H), the rows of all
    tokens of texts in order of length."""

    def __init__(self, found: folder.PoolingFolder, model: Any, encoder: nn.Module) -> None:
        """`encoder` is a part of `model`, or the model. Raises ModelRefused."""
        first, *others = found.steps
        self._first: PoolHead | ModelHead | LogitHead
        match first:
            case folder.Pool(modes):
                self._first = PoolHead(modes)
            case folder.ClassifierStep():
                self._first = ModelHead(model, encoder)
            case folder.LogitScore():
                self._first = LogitHead(model, encoder, first)
            case _:
                raise AssertionError("a folder's steps begin with one that makes a vector")
        self._others: list[nn.Module] = []
        for step in others:
            match step:
                case folder.Dense():
                    layer = DenseLayer(found.files, step)
                    device = next(encoder.parameters()).device
                    self._others.append(layer.to(device).requires_grad_(False))
                case folder.Normalize():
                    self._others.append(_UnitLength())
                case _:
                    raise ModelRefused(
                        f"modules.json of {found.files.model_path} makes vectors twice"
                    )

    def __call__(self, rows: Tensor, texts: Seq[Text]) -> Tensor:
        vectors = self._first(rows, texts)
        for layer in self._others:
            vectors = layer(vectors)
        return vectors


class _UnitLength(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1)
