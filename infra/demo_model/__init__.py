"""Where the model that ships with the repository lies. Loads nothing."""

from pathlib import Path


def demo_model_path() -> Path:
    """The folder of the demo model, laid out as Hugging Face lays out its models."""
    return Path(__file__).resolve().parent
