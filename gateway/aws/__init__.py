"""The gateway on AWS Lambda: what wakes it and what it answers. The app itself is `gateway.app`.

Somebody waits for its imports, so whatever is imported after this package is put off or left out:

- Models of pydantic are built when they are first used. Of those that FastAPI brings, most describe
  OpenAPI documents, which a function is hardly ever asked for.
- The garbage collector begins later: imports make 120,000 objects that stay, and no garbage.
"""

import gc

from pydantic import BaseModel

BaseModel.model_config["defer_build"] = True
gc.set_threshold(50_000)
