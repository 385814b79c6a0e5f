"""Reads how a model's vectors are made: the folders of sentence-transformers, whose modules.json
lists the steps, and plain `*ForSequenceClassification` folders. Loads no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from workers.engine.interface import ModelRefused
from workers.model.files import DEFAULT_REVISION, ModelFiles
from workers.model.model_path import check_place

Task = Literal["feature-extraction", "sequence-classification", "text-generation"]
Activation = Literal["none", "sigmoid", "softmax"]

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# The switches of sentence-transformers before 6.0.
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The last part of a class's name -> its activation.
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
# Files of a Transformer, of which the first is read. Old ones are named after their model's type.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_OF_DOCUMENTS = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class Pool:
    """One vector from the vectors of a text's tokens; several modes are concatenated."""

    modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation (a class of torch.nn); `path` holds its weights."""

    path: str
    num_in: int
    num_out: int
    has_bias: bool
    activation: str
    adds_input: bool


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scales vectors to length 1."""


@dataclass(frozen=True, slots=True)
class ClassifierStep:
    """The logits of the model's own classifier."""


@dataclass(frozen=True, slots=True)
class LogitScore:
    """The last position's logit of one token, less that of another."""

    true_id: int
    false_id: int | None


Step = Pool | Dense | Normalize | ClassifierStep | LogitScore


@dataclass(frozen=True, slots=True)
class PoolingFolder:
    """What the files say; None or empty for what they do not say."""

    files: ModelFiles
    task: Task
    steps: tuple[Step, ...]
    is_cross_encoder: bool = False
    activation: Activation | None = None  # of a cross-encoder's scores
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dimensions: tuple[int, ...] = ()
    max_tokens: int | None = None
    lowercases: bool = False
    # Whether a chat template renders the inputs; None: sentence-transformers has not saved it.
    has_messages: bool | None = None

    @property
    def is_normalized(self) -> bool:
        return bool(self.steps) and isinstance(self.steps[-1], Normalize)


def read_folder(model_path: str, revision: str | None = None) -> PoolingFolder | None:
    """Reads a folder; None for a model that generates text. Raises ModelRefused."""
    check_place(model_path)
    files = ModelFiles(model_path, revision or DEFAULT_REVISION)
    modules = files.read_json("modules.json")
    if modules is not None:
        return _SavedModules(files, modules).read()
    architectures = files.read_object("config.json").get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not any(str(name).endswith("ForSequenceClassification") for name in names):
        return None
    return _plain_classifier(files)


def _plain_classifier(files: ModelFiles) -> PoolingFolder:
    config = files.read_object("config.json")
    named = config.get("sbert_ce_default_activation_function")
    settings = config.get("sentence_transformers")
    if isinstance(settings, dict):
        named = settings.get("activation_fn", named)
    return PoolingFolder(
        files,
        "sequence-classification",
        (ClassifierStep(),),
        is_cross_encoder=named is not None or isinstance(settings, dict),
        activation=None if named is None else _activation(files, named),
    )


class _SavedModules:
    """A folder that sentence-transformers has saved."""

    def __init__(self, files: ModelFiles, modules: Any) -> None:
        self._files = files
        self._modules = modules

    def read(self) -> PoolingFolder:
        kinds = [self._kind(module) for module in self._listed()]
        if not kinds or kinds[0][0] != "Transformer":
            raise self._refusal("does not begin with a Transformer")
        if path := kinds[0][1]:
            raise self._refusal(
                f"has its Transformer in {path!r}: batchway reads one from the model's own folder, "
                "no sub-folder"
            )
        transformer = self._transformer()
        task = transformer.get("transformer_task", "feature-extraction")
        steps = tuple(step for kind in kinds[1:] for step in self._steps(*kind))
        settings = self._files.read_object("config_sentence_transformers.json")
        model_type = settings.get("model_type", "SentenceTransformer")
        if model_type not in ("SentenceTransformer", "CrossEncoder"):
            raise self._refusal(f"is of a {model_type}, whose results are no single vectors")
        if task == "sequence-classification":
            steps = (ClassifierStep(), *steps)
        if task == "text-generation" and not any(isinstance(step, LogitScore) for step in steps):
            raise self._refusal("generates text without a LogitScore")
        if task not in ("feature-extraction", "sequence-classification", "text-generation"):
            raise self._refusal(f"has the task {task!r}, which batchway does not serve")
        if not steps or isinstance(steps[0], Dense | Normalize):
            raise self._refusal("makes no vector of a text: it lists no Pooling")
        named = settings.get("activation_fn")
        modalities = transformer.get("modality_config")
        return PoolingFolder(
            self._files,
            task,
            steps,
            is_cross_encoder=model_type == "CrossEncoder",
            activation=None if named is None else _activation(self._files, named),
            dimensions=self._dimensions(settings),
            max_tokens=_number(transformer.get("max_seq_length")),
            lowercases=bool(transformer.get("do_lower_case")),
            has_messages="message" in modalities if isinstance(modalities, dict) else False,
            **self._prompts(settings),
        )

    def _transformer(self) -> dict[str, Any]:
        """The settings of the Transformer; empty if it has none."""
        for name in _TRANSFORMER_FILES:
            if settings := self._files.read_object(name):
                return settings
        return {}

    def _listed(self) -> list[dict[str, Any]]:
        modules = self._modules
        if not isinstance(modules, list) or not all(
            isinstance(module, dict) and isinstance(module.get("type"), str) for module in modules
        ):
            raise self._refusal("is no list of modules with types")
        return modules

    def _kind(self, module: Mapping[str, Any]) -> tuple[str, str]:
        """The module's class and path."""
        package, _, name = module["type"].rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            raise self._refusal(
                "names code that comes with the model, which batchway never runs: " + module["type"]
            )
        return name, str(module.get("path", ""))

    def _steps(self, name: str, path: str) -> list[Step]:
        settings = self._files.read_object(str(PurePosixPath(path, "config.json")))
        match name:
            case "Pooling":
                return [self._pool(settings)]
            case "Dense":
                return [self._dense(settings, path)]
            case "Normalize":
                return [Normalize()]
            case "LogitScore":
                true_id, false_id = settings.get("true_token_id"), settings.get("false_token_id")
                if not isinstance(true_id, int) or not isinstance(false_id, int | None):
                    raise self._refusal("has a LogitScore without a token id")
                return [LogitScore(true_id, false_id)]
            case "Dropout":
                return []  # only in training
        raise self._refusal(f"lists a {name}, which batchway does not compute")

    def _pool(self, settings: Mapping[str, Any]) -> Pool:
        mode = settings.get("pooling_mode")
        if mode is None:
            mode = [new for old, new in _OLD_MODES.items() if settings.get(old)] or "mean"
        modes = tuple(mode) if isinstance(mode, list | tuple) else (mode,)
        if unknown := [mode for mode in modes if mode not in MODES]:
            raise self._refusal(f"has an unknown pooling mode, {unknown[0]!r}")
        if settings.get("include_prompt") is False:
            raise self._refusal("leaves the prompt out of the pooling, which batchway cannot")
        return Pool(modes)

    def _dense(self, settings: Mapping[str, Any], path: str) -> Dense:
        num_in, num_out = settings.get("in_features"), settings.get("out_features")
        activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not (isinstance(num_in, int) and isinstance(num_out, int)):
            raise self._refusal("has a Dense without sizes")
        if not isinstance(activation, str) or not activation.startswith("torch.nn."):
            raise self._refusal(f"has a Dense with an activation outside torch, {activation!r}")
        if settings.get("module_input_name", "sentence_embedding") == "token_embeddings":
            raise self._refusal("has a Dense on tokens, which batchway does not compute")
        return Dense(
            path,
            num_in,
            num_out,
            bool(settings.get("bias", True)),
            activation.rpartition(".")[2],
            bool(settings.get("use_residual")),
        )

    def _prompts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        prompts = settings.get("prompts")
        named = {
            str(name): text
            for name, text in (prompts.items() if isinstance(prompts, dict) else ())
            if isinstance(text, str) and text
        }
        first = next((named[name] for name in _OF_DOCUMENTS if name in named), None)
        if first is not None:
            named["document"] = first
        default = settings.get("default_prompt_name")
        return {"prompts": named, "default_prompt": default if default in named else ""}

    def _dimensions(self, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """The smaller dimensions that the model declares: `matryoshka_dimensions`, in either file,
        or the `truncate_dim` of its users."""
        config = self._files.read_object("config.json")
        found: set[int] = set()
        for value in (
            settings.get("matryoshka_dimensions"),
            config.get("matryoshka_dimensions"),
            settings.get("truncate_dim"),
        ):
            listed = value if isinstance(value, list) else [value]
            found.update(number for number in map(_number, listed) if number is not None)
        return tuple(sorted(found))

    def _refusal(self, what: str) -> ModelRefused:
        return ModelRefused(f"modules.json of {self._files.model_path} {what}")


def _activation(files: ModelFiles, name: Any) -> Activation:
    """The activation with the name of a class of torch. Raises ModelRefused."""
    found = _ACTIVATIONS.get(str(name).rpartition(".")[2])
    if found is None or not str(name).startswith("torch.nn."):
        raise ModelRefused(f"{files.model_path} has an activation that batchway lacks: {name}")
    return found


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < 2**31 else None
