"""A run's metrics in the trackers that people already use: TensorBoard, Weights & Biases, Trackio.

Each is a thin layer over the library, writes on this machine only unless the library's own environment variables say
otherwise, and gets a chunk of iterations at a time.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_mini.config import Config, UserError

if TYPE_CHECKING:
    from jaxrl_mini.learning.metrics import History

TRACKERS = ("tensorboard:DIR", "wandb", "trackio")
PROJECT = "jaxrl_mini"
"""What the runs are filed under, where a tracker has projects."""

Track = Callable[["History"], None]


def check(targets: Sequence[str], resuming: bool = False) -> None:
    """Refuses what is no tracker, twice the same one, or a library that is not installed.

    Args:
      targets: of the forms in `TRACKERS`.
      resuming: a folder of TensorBoard may hold the run's beginning.

    Raises:
      UserError: as said; the message names it and what would be right.
    """
    for target in targets:
        kind, colon, folder = target.partition(":")
        if (kind, bool(colon), bool(folder)) not in (
            ("tensorboard", True, True), ("wandb", False, False), ("trackio", False, False)
        ):  # fmt: skip
            raise UserError(f"--track {target!r} is unknown: expected one of {', '.join(TRACKERS)}")
        if importlib.util.find_spec(kind) is None:
            raise UserError(f"--track {target} needs {kind}: pip install '.[{kind}]' in the source folder")
        if kind == "tensorboard":
            _check_place(folder, resuming)
    if len(set(targets)) < len(targets):
        raise UserError(f"--track {' '.join(targets)} names a tracker twice: name each once")


def _check_place(folder: str, resuming: bool) -> None:
    """TensorBoard draws all that lies in a folder as one curve, so a folder is for one run."""
    path = Path(folder)
    try:
        taken = (path.exists() and not path.is_dir()) or (not resuming and any(path.glob("*tfevents*")))
    except OSError as error:
        raise UserError(f"--track tensorboard:{folder} cannot be read ({error.strerror})") from error
    if taken:
        raise UserError(f"--track tensorboard:{folder} is a file or holds a run already: name a new folder")


@contextmanager
def tracking(targets: Sequence[str], config: Config, name: str) -> Iterator[Track]:
    """What takes the history of each chunk to all the trackers, which end with the run.

    Args:
      targets: of the forms in `TRACKERS`.
      config: the settings, which wandb and trackio keep.
      name: of the run, there.
    """
    with ExitStack() as stack:
        open_ones = [
            stack.enter_context(_OPEN[target.partition(":")[0]](target.partition(":")[2], config, name))
            for target in targets
        ]

        def track(history: "History") -> None:
            for one in open_ones:
                one(history)

        yield track


def _rows(history: "History") -> Iterator[tuple[int, Mapping[str, float]]]:
    """The iterations of a chunk: number, and those metrics by name that are numbers, as a record has them."""
    names = [name for name in history if name != "iteration"]
    for i, iteration in enumerate(history["iteration"].tolist()):
        metrics = {name: history[name][i].item() for name in names}
        yield iteration, {name: value for name, value in metrics.items() if math.isfinite(value)}


def _log_rows(run: Any, history: "History") -> None:
    """For the two whose runs have the same `log`."""
    for iteration, metrics in _rows(history):
        run.log(dict(metrics), step=iteration)


@contextmanager
def _tensorboard(folder: str, config: Config, name: str) -> Iterator[Track]:
    from tensorboard.summary import Writer

    try:
        writer = Writer(folder)
    except OSError as error:
        raise UserError(f"--track tensorboard:{folder} cannot be written ({error.strerror})") from error

    def track(history: "History") -> None:
        for iteration, metrics in _rows(history):
            for metric, value in metrics.items():
                writer.add_scalar(metric, value, iteration)
        writer.flush()

    try:
        yield track
    finally:
        writer.close()


@contextmanager
def _wandb(_: str, config: Config, name: str) -> Iterator[Track]:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    settings = wandb.Settings(console="off", silent=True)
    with wandb.init(project=PROJECT, name=name, config=config.to_dict(), mode=mode, settings=settings) as run:
        yield partial(_log_rows, run)


@contextmanager
def _trackio(_: str, config: Config, name: str) -> Iterator[Track]:
    import trackio

    with redirect_stdout(sys.stderr):  # ours is for metrics
        run = trackio.init(
            PROJECT, name=name, config=config.to_dict(), embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
    try:
        yield partial(_log_rows, run)
    finally:
        with redirect_stdout(sys.stderr):
            trackio.finish()


_OPEN: dict[str, Callable[[str, Config, str], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
