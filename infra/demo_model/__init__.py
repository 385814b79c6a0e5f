"""Path of the demo model in the repository. Loads nothing."""

from pathlib import Path


def demo_model_path() -> Path:
    """The demo model's folder, in the Hugging Face layout."""
    return Path(__file__).resolve().parent
