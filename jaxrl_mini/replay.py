"""Replays recorded episodes through our update and compares what they lead to: ``replay FILE.npz ...``."""

import json
import math

from jaxrl_mini.config import UserError
from jaxrl_mini.machine import commandline, effort
from jaxrl_mini.objective.own import check_given, load_advantage

EXAMPLES = """\
examples:
  python -m jaxrl_mini.train --seed 7 --trajectories run.npz
  python -m jaxrl_mini.replay run.npz

Prints a JSON object per file and exits with code 1 where an error exceeds the tolerance. To check a port of the loop
to another framework, record its run: `config` (JSON text: method, iterations, groups, group_size, epochs, lr, clip,
beta), `actions` int8 [iteration, group, episode, step] with -1 after the end, `rewards` (0 or 1),
`advantages`, `old_log_probs`, `logits` [iteration + 1, state, action], and `history_loss`, `history_mean_kl`,
`history_ratio_outside_clip_fraction`; all numbers finite. Of another task than the article's, `config` has `task` and
`task_digest` (see check_task), too, and beside the actions there are `views` [iteration, group, episode, step], the
number of what the policy saw in its step, `instances` [iteration, group], and `submissions` [iteration, group,
episode], counted from 1, 0 for nothing.
"""

TOLERANCES = "a number from 0, finite"


def main(arguments: list[str]) -> int:
    """Parses, replays, prints."""
    parser = commandline.Parser("replay", description="Replays recorded episodes.", epilog=EXAMPLES)
    parser.add_argument(
        "files",
        nargs="+",
        type=commandline.path,
        metavar="FILE.npz",
        help="a recording, as `train --trajectories` writes it",
    )
    parser.add_argument(
        "--tolerance",
        type=commandline.number(float, TOLERANCES),
        default=1e-4,
        metavar="FLOAT",
        help="largest absolute error accepted [1e-4]",
    )
    commandline.add_advantage_flag(parser, "recording")
    commandline.add_task_flag(parser, "recording")
    commandline.add_device_flag(parser)
    flags = parser.parse_args(arguments)
    own = [load_advantage(one) for one in flags.advantage]
    if not 0 <= flags.tolerance < math.inf:
        raise UserError(f"--tolerance {flags.tolerance} is out of range: expected {TOLERANCES}")
    commandline.use_device(flags.device)
    from jaxrl_mini.runs import recording, replaying

    loaded = [recording.read(path, flags.task) for path in flags.files]
    having = [(f"recording {path}", one.config.advantage) for path, one in zip(flags.files, loaded, strict=True)]
    check_given(own, having)
    commandline.say_how_long(sum(effort.alone(one.config) for one in loaded))
    all_ok = True
    for path, one in zip(flags.files, loaded, strict=True):
        errors = replaying.replay_errors(one)
        ok = all(error <= flags.tolerance for error in errors.values() if error is not None)
        all_ok &= ok
        shown = {name: error if error is None or math.isfinite(error) else None for name, error in errors.items()}
        print(json.dumps({"file": path, "iterations": one.config.iterations, "max_abs_error": shown, "ok": ok}))
    return 0 if all_ok else 1


if __name__ == "__main__":
    commandline.run_command(main)
