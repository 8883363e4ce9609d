"""What a folder in Hugging Face format says, by the `transformers` library, or why it cannot be read.

The library reads configuration and tokenizer; it is imported here only, and only when a folder is read,
because importing it takes seconds. Nothing is fetched, no code from a folder runs, and no pickle is read.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_mini.config import UserError
from jaxrl_mini.machine import files


class CheckpointError(UserError):
    """A folder that cannot be read as a checkpoint; one line that says what and why."""


def ask(read: Callable[[Any], Any], folder: Path, what: str) -> Any:
    """Calls the transformers library and turns whatever it raises into one line."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what matters is said here, in one line
    try:
        with _alone:
            import transformers

            return read(transformers)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        reason = " ".join(str(error).split())[:200]
        message = f"the {what} of model {str(folder)!r} cannot be read: {type(error).__name__}: {reason}"
        raise CheckpointError(message) from error


_alone = threading.Lock()
"""The library imports its parts when they are asked for, and lacks those that another thread is importing."""


def read_json(path: Path) -> dict[str, Any]:
    """A file of a folder.

    Raises:
      CheckpointError: it is not there, or holds no JSON object.
    """
    try:
        data = json.loads(files.read(path))
        if not isinstance(data, dict):
            raise ValueError("it holds no JSON object")
        return data
    except FileNotFoundError:
        raise CheckpointError(f"model {str(path.parent)!r} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
