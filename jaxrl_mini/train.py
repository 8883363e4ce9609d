"""Trains a policy and writes the record of the run: ``python -m jaxrl_mini.train --seed 7``."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.machine import commandline, hardware
from jaxrl_mini.runs import trackers

if TYPE_CHECKING:
    from jaxrl_mini.learning.result import Result

EXAMPLES = """\
examples:
  python -m jaxrl_mini.train --seed 7
  python -m jaxrl_mini.train --method rs-sft --iterations 200 --output runs/sft.json

On stdout: the metrics as JSON lines every 20 iterations, then a line with `before`, `after` and `output`.
"""


def default_output(config: Config) -> str:
    """Where the record goes unless `--output` says otherwise."""
    return f"runs/{config.backend}-{config.method}-seed-{config.seed}.json"


def main(arguments: list[str]) -> None:
    """Parses, trains, writes."""
    parser = commandline.Parser("train", description="Trains a policy.", epilog=EXAMPLES)
    commandline.add_config_flags(parser)
    commandline.add_device_flag(parser)
    commandline.add_mesh_flags(parser)
    parser.add_argument(
        "--output", type=commandline.path, metavar="FILE", help="the record [runs/BACKEND-METHOD-seed-SEED.json]"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is another run's")
    parser.add_argument(
        "--trajectories",
        type=commandline.path,
        metavar="FILE",
        help="also write the sampled episodes, for replay (.npz)",
    )
    parser.add_argument(
        "--save-policy",
        type=commandline.path,
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
        type=commandline.path,
        metavar="DIR",
        help="keep the run there on the way, and on Ctrl-C or SIGTERM",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=commandline.number(int, "a whole number from 1"),
        metavar="K",
        help="iterations between checkpoints [20]",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    flags = parser.parse_args(arguments)
    config = commandline.config_from(flags)
    if flags.mesh is not None and config.backend != "hf":
        raise UserError(f"--mesh {flags.mesh} has no use with backend {config.backend}: leave it out")
    for flag, given in (("--checkpoint-every", flags.checkpoint_every), ("--resume", flags.resume or None)):
        if given is not None and flags.checkpoint is None:
            raise UserError(f"{flag} has no use without --checkpoint: name the folder of the checkpoints")
    trackers.check(flags.track, resuming=flags.resume)
    if flags.trajectories is not None and config.exact_gradient:
        raise UserError("--trajectories has no use with --exact-gradient: no sampled episode leads to that update")
    path = Path(flags.output or default_output(config))
    if flags.trajectories is not None and os.path.realpath(flags.trajectories) == os.path.realpath(path):
        raise UserError(f"--trajectories {flags.trajectories} is also the output: name another file")
    if flags.save_policy is not None:
        folder = os.path.realpath(flags.save_policy)
        if os.path.commonpath([folder, os.path.realpath(path)]) == folder:
            raise UserError(f"--save-policy {flags.save_policy} is a folder of its own: name an output outside of it")

    commandline.use_processes(flags)
    commandline.use_device(flags.device)
    if config.backend == "table":
        hardware.use_one_thread_per_call()
    mesh = commandline.mesh_from(flags)
    import jax
    from tqdm import tqdm

    from jaxrl_mini.learning import checkpoint, loop
    from jaxrl_mini.learning.metrics import History
    from jaxrl_mini.machine import files
    from jaxrl_mini.policies import folders
    from jaxrl_mini.runs import recording, records

    if flags.checkpoint is not None and jax.process_count() > 1:
        raise UserError(f"--checkpoint {flags.checkpoint} is for a run in one process: leave it out")
    if jax.process_index():  # the first process alone reports and writes
        loop.run(config, mesh=mesh)
        return
    if flags.save_policy is not None:
        folders.check_destination(flags.save_policy, flags.overwrite)
    if not flags.overwrite:
        records.check_replaceable(path, config)
        if flags.trajectories is not None and Path(flags.trajectories).exists():
            raise UserError(f"--trajectories {flags.trajectories} exists: name another file or use --overwrite")
    checkpoints = None
    if flags.checkpoint is not None:
        every = checkpoint.EVERY if flags.checkpoint_every is None else flags.checkpoint_every
        checkpoints = checkpoint.Checkpoints(
            flags.checkpoint, config, every=every, resume=flags.resume, say=_say, mesh=mesh
        )
    with (
        files.Output(path) as output,
        files.optional_output(flags.trajectories) as trajectories,
        checkpoints or contextlib.nullcontext(),
        trackers.tracking(flags.track, config, path.stem) as track,
        tqdm(total=config.iterations, unit="iteration", disable=not sys.stderr.isatty()) as bar,
    ):

        def report(history: History) -> None:
            last = {name: column[-1].item() for name, column in history.items()}
            bar.update(last["iteration"] + 1 - bar.n)
            track(history)
            with tqdm.external_write_mode():
                print(json.dumps(records.finite(last)), flush=True)

        result = loop.run(config, on_chunk=report, checkpoints=checkpoints, mesh=mesh)
        if trajectories is not None:
            recording.write(result, trajectories)
        if flags.save_policy is not None:
            save_policy(result, flags.save_policy, flags.overwrite)
        record = records.build(result)
        records.write(record, output)
    print(json.dumps({"before": record["before"], "after": record["after"], "output": str(path)}))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def save_policy(result: "Result", folder: str, overwrite: bool) -> None:
    """Keeps the policy after the last iteration."""
    if result.logits is None:
        from jaxrl_mini.policies.pretrained import save_checkpoint

        save_checkpoint(folder, result.checkpoint, overwrite)
    else:
        from jaxrl_mini.policies.saved import save_table

        save_table(folder, result.logits[-1], result.config, overwrite)


if __name__ == "__main__":
    commandline.run_command(main)
