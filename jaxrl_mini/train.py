"""Trains a policy and writes the record of the run: ``python -m jaxrl_mini.train --seed 7``."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_mini.config import ARTICLE, Config, UserError, UserErrors
from jaxrl_mini.machine import commandline, effort
from jaxrl_mini.objective.own import load_advantage
from jaxrl_mini.runs import trackers

if TYPE_CHECKING:
    from jaxrl_mini.learning.result import Result
    from jaxrl_mini.policies.folders import Destination

EXAMPLES = """\
examples:
  python -m jaxrl_mini.train --seed 7
  python -m jaxrl_mini.train --method rs-sft --iterations 200 --output runs/sft.json

On stdout: the metrics as JSON lines every 20 iterations, then a line with `before`, `after` and `output`.
"""


MAX_NAME = 120
"""Characters of a default output's name; what is longer ends in a digest."""


def default_output(config: Config) -> str:
    """Where the record goes unless `--output` says otherwise: every setting that is not the default has its place."""
    words = [config.backend, config.method, *([] if config.model is None else [Path(config.model).name or "model"])]
    for field in dataclasses.fields(Config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if field.name not in ("backend", "method", "model", "seed") and value != field.default:
            words.append(name if value is True else f"{name}-{value}")
    text = "-".join([*words, "seed", str(config.seed)])
    safe = re.sub(r"[^\w.+-]", "-", text, flags=re.ASCII)
    if len(safe) > MAX_NAME or safe != text.replace(":", "-"):
        digest = hashlib.sha256(json.dumps(config.to_dict()).encode()).hexdigest()[:8]
        safe = f"{safe[: MAX_NAME - 20 - len(digest)].rstrip('-.')}-{digest}-seed-{config.seed}"
    return f"runs/{safe}.json"


def main(arguments: list[str]) -> None:
    """Parses, trains, writes."""
    parser = commandline.Parser("train", description="Trains a policy.", epilog=EXAMPLES)
    commandline.add_config_flags(parser)
    commandline.add_device_flag(parser)
    commandline.add_mesh_flags(parser)
    parser.add_argument(
        "--output",
        type=commandline.output,
        metavar="FILE",
        help="the record [runs/BACKEND-METHOD-SETTINGS-seed-SEED.json, with the settings that are not the defaults]",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is there of another run (what a link names is replaced)"
    )
    parser.add_argument(
        "--trajectories",
        type=commandline.output,
        metavar="FILE",
        help="also write the sampled episodes, for replay (.npz)",
    )
    parser.add_argument(
        "--save-policy",
        type=commandline.output,
        metavar="DIR",
        help="keep the policy, for play; an hf one as a checkpoint folder",
    )
    parser.add_argument(
        "--track",
        nargs="+",
        default=[],
        metavar="TRACKER",
        help=f"also send the metrics to {', '.join(trackers.TRACKERS)}",
    )
    parser.add_argument(
        "--checkpoint",
        type=commandline.output,
        metavar="DIR",
        help="keep the run there on the way, and on Ctrl-C, SIGTERM, SIGHUP or SIGUSR1",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=commandline.number(int, "a whole number from 1"),
        metavar="K",
        help="iterations between checkpoints [20]",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    flags = parser.parse_args(arguments)
    flags.advantage = load_advantage(flags.advantage)
    config = commandline.config_from(flags)
    if flags.mesh is not None and config.backend != "hf":
        raise UserError(f"--mesh {flags.mesh} has no use with backend {config.backend}: leave it out")
    for flag, given in (("--checkpoint-every", flags.checkpoint_every), ("--resume", flags.resume or None)):
        if given is not None and flags.checkpoint is None:
            raise UserError(f"{flag} has no use without --checkpoint: name the folder of the checkpoints")
    why = None
    if config.task != ARTICLE:
        from jaxrl_mini.exact.beliefs import too_many  # imports NumPy
        from jaxrl_mini.tasks.situations import stacked
        from jaxrl_mini.tasks.specification import load_task

        task = load_task(config.task)
        if config.exact_gradient:
            stacked(task, "train")
        why = too_many(task) if config.backend == "hf" else None
    trackers.check(flags.track, resuming=flags.resume)
    if flags.trajectories is not None and config.exact_gradient:
        raise UserError("--trajectories has no use with --exact-gradient: no sampled episode leads to that update")
    path = Path(flags.output or default_output(config))
    if flags.trajectories is not None and os.path.realpath(flags.trajectories) == os.path.realpath(path):
        raise UserError(f"--trajectories {flags.trajectories} is also the output: name another file")
    if flags.save_policy is not None:
        folder = os.path.realpath(flags.save_policy)
        for other in filter(None, (path, flags.trajectories)):
            if os.path.commonpath([folder, os.path.realpath(other)]) == folder:
                raise UserError(f"--save-policy {flags.save_policy} is a folder of its own: name {other} elsewhere")

    commandline.use_processes(flags)
    commandline.use_device(flags.device, one_thread_per_call=config.backend == "table")
    mesh = commandline.mesh_from(flags)
    import jax
    from tqdm import tqdm

    from jaxrl_mini.learning import checkpoint, loop
    from jaxrl_mini.learning.metrics import History
    from jaxrl_mini.machine import files
    from jaxrl_mini.machine.runtime import runtime
    from jaxrl_mini.runs import recording, records

    if flags.checkpoint is not None and jax.process_count() > 1:
        raise UserError(f"--checkpoint {flags.checkpoint} is for a run in one process: leave it out")
    if jax.process_index():  # the first process alone reports and writes
        loop.run(config, mesh=mesh)
        return
    policy = None if flags.save_policy is None else _destination(flags.save_policy, config, flags.overwrite)
    checkpoints, began = None, runtime()
    if flags.checkpoint is not None:
        every = checkpoint.EVERY if flags.checkpoint_every is None else flags.checkpoint_every
        checkpoints = checkpoint.Checkpoints(
            flags.checkpoint, config, every=every, resume=flags.resume, say=commandline.note, mesh=mesh
        )
    with (
        files.Output(path, records.not_of(config), flags.overwrite) as output,
        files.optional_output(flags.trajectories, recording.not_of(config), flags.overwrite) as trajectories,
        checkpoints or contextlib.nullcontext(),
        trackers.tracking(flags.track, config, path.stem) as track,
        tqdm(total=config.iterations, unit="iteration", disable=not sys.stderr.isatty()) as bar,
    ):
        if why is not None:
            commandline.note(f"{why}, so the exact figures are null")
        commandline.say_how_long(effort.alone(config), effort.kept(config))

        def report(history: History) -> None:
            last = {name: column[-1].item() for name, column in history.items()}
            bar.update(last["iteration"] + 1 - bar.n)
            track(history)
            with tqdm.external_write_mode():
                commandline.say(json.dumps(records.finite(last)))

        result = loop.run(config, on_chunk=report, checkpoints=checkpoints, mesh=mesh)
        record = records.build(result, began)
        writes: dict[str, Callable[[], object]] = {"the record": lambda: records.write(record, output)}
        if trajectories is not None:
            writes["the recording"] = lambda: recording.write(result, trajectories)
        if policy is not None:
            writes["the policy"] = lambda: _write_policy(result, policy)
        errors = files.write_all(writes)
    where = None if "the record" in errors else str(path)
    commandline.say(json.dumps({"before": record["before"], "after": record["after"], "output": where}))
    if errors:
        raise UserErrors("not all is written", [*errors.values()])


def _destination(folder: str, config: Config, overwrite: bool) -> "Destination":
    from jaxrl_mini.policies import folders, saved
    from jaxrl_mini.tasks.specification import load_task

    if config.backend == "table":
        return saved.destination(folder, config, overwrite)
    settings = {"command": "train", "config": config.to_dict()}
    return folders.Destination(folder, overwrite, folders.made_by(settings, load_task(config.task)))


def _write_policy(result: "Result", place: "Destination") -> None:
    """Keeps the policy after the last iteration."""
    if result.logits is None:
        from jaxrl_mini.policies.pretrained import write_checkpoint

        write_checkpoint(place, result.checkpoint)
    else:
        from jaxrl_mini.policies.saved import write_table

        write_table(place, result.logits[-1])


if __name__ == "__main__":
    commandline.run_command(main)
