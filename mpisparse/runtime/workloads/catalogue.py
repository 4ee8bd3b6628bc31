"""The built-in models and data by name, with descriptions and import paths. Imports none of them."""

from __future__ import annotations

from dataclasses import dataclass, field

_HOME = "mpisparse.runtime.workloads"


@dataclass(frozen=True)
class ModelEntry:
    """A model: factory(sizes, **options), its default data, and the sizes the data must provide."""

    description: str
    factory: str
    data: str
    needs: tuple[str, ...]
    options: dict[str, int] = field(default_factory=dict)
    masked: bool = False


@dataclass(frozen=True)
class DataEntry:
    """A data source: factory(**options), also called with `masked` if it is text."""

    description: str
    factory: str
    options: dict[str, str] = field(default_factory=dict)
    text: bool = False


def _image(description: str, factory: str, **options: int) -> ModelEntry:
    return ModelEntry(description, f"{_HOME}.models.{factory}", "synthetic-images", ("classes", "channels"), options)


def _bert(layers: int, width: int) -> ModelEntry:
    description = f"masked language model: {layers} layers, {width} wide, {width // 64} heads"
    options = {"layers": layers, "width": width}
    return ModelEntry(
        description, f"{_HOME}.models.bert:Bert", "python-words", ("vocabulary", "length"), options, masked=True
    )


def _gpt(description: str, layers: int, heads: int, width: int, **options: int) -> ModelEntry:
    shape = f"causal language model: {layers} layers, {width} wide, {heads} heads; {description}"
    options = {"layers": layers, "heads": heads, "width": width, **options}
    return ModelEntry(shape, f"{_HOME}.models.gpt:Gpt", "python-text", ("vocabulary", "length"), options)


MODELS: dict[str, ModelEntry] = {
    "digits-cnn": ModelEntry(
        "two convolutions and two linear layers, for small images",
        f"{_HOME}.models.convnet:convnet",
        "digits",
        ("classes", "channels", "height", "width"),
    ),
    "resnet20": _image("narrow residual network with 20 layers, for small images", "resnet:resnet20"),
    "resnet18": _image("residual network with 18 layers (basic blocks, CIFAR-style stem)", "resnet:resnet18"),
    "resnet152": _image("residual network with 152 layers (bottlenecks, CIFAR-style stem)", "resnet:resnet152"),
    "vgg16": _image("VGG with 16 layers and batch norm, CIFAR-style", "vgg:vgg", layers=16),
    "vgg19": _image("VGG with 19 layers and batch norm, CIFAR-style", "vgg:vgg", layers=19),
    "lstm": ModelEntry(
        "language model with two LSTM layers, 512 wide; characters or words, depending on the data",
        f"{_HOME}.models.lstm:LanguageModel",
        "python-text",
        ("vocabulary",),
    ),
    "lstm-small": ModelEntry(
        "the same, 128 wide",
        f"{_HOME}.models.lstm:LanguageModel",
        "python-text",
        ("vocabulary",),
        {"width": 128},
    ),
    "lstm-large": ModelEntry(
        "the same, 1,114 wide: 29 million parameters with 8,192 words",
        f"{_HOME}.models.lstm:LanguageModel",
        "python-words",
        ("vocabulary",),
        {"width": 1114},
    ),
    "gpt": _gpt("the same as gpt-nano", 4, 4, 128),
    "gpt-nano": _gpt("0.8 million parameters with characters", 4, 4, 128),
    "gpt-mini": _gpt("10.8 million", 6, 6, 384),
    "gpt-small": _gpt("124 million, with an embedding of as many rows as GPT-2 has tokens", 12, 12, 768, rows=50_257),
    "bert-mini": _bert(4, 256),
    "bert-small": _bert(4, 512),
    "bert-medium": _bert(8, 512),
    "bert-base": _bert(12, 768),
    "ncf": ModelEntry(
        "neural collaborative filtering: matrix factorization and a perceptron in parallel",
        f"{_HOME}.models.ncf:CollaborativeFilter",
        "synthetic-ratings",
        ("users", "items"),
    ),
}

DATA: dict[str, DataEntry] = {
    "digits": DataEntry("scikit-learn's 1,797 digits of 8 x 8 pixels", f"{_HOME}.data.images:digits"),
    "synthetic-images": DataEntry(
        "6,000 noisy 32 x 32 images of 10 patterns, generated", f"{_HOME}.data.images:synthetic_images"
    ),
    "python-text": DataEntry(
        "the characters of Python's standard library", f"{_HOME}.data.corpus:python_source", {"unit": "characters"}, True
    ),
    "python-words": DataEntry(
        "the words of Python's standard library", f"{_HOME}.data.corpus:python_source", {"unit": "words"}, True
    ),
    "synthetic-ratings": DataEntry(
        "which of 1,000 items 2,000 users liked, generated", f"{_HOME}.data.ratings:synthetic_ratings"
    ),
}
