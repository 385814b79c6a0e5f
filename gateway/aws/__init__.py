"""The gateway on AWS Lambda: its events and answers. The app itself is `gateway.http.app`.

Somebody waits for its imports, so whatever is imported after this package is put off or left out:

- The garbage collector waits until `imports_are_done`: they make 120,000 objects, and no garbage.
  It never looks at these again: its next round would cost a start what was just saved.
- Models of pydantic are built when they are first used. Of those that FastAPI brings, most describe
  OpenAPI documents, which a function is hardly ever asked for.
"""

import gc

_THRESHOLDS = gc.get_threshold()


def _imports_begin() -> None:
    gc.set_threshold(150_000)
    from pydantic import BaseModel  # makes a third of the objects itself

    BaseModel.model_config["defer_build"] = True


def imports_are_done() -> None:
    """Garbage is collected as ever. Every entry point calls it before it answers anybody."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


_imports_begin()
