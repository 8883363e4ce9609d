"""Judges gradient estimators exactly: ``python -m jaxrl_mini.estimators``."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

from jaxrl_mini.config import ADVANTAGES, AGGREGATIONS, ARTICLE, OWN_FORM, Config, UserError, UserErrors, Variant
from jaxrl_mini.machine import commandline, effort
from jaxrl_mini.objective.advantage import asks_for_batch, formula
from jaxrl_mini.objective.own import load_advantage

EXAMPLES = """\
examples:
  python -m jaxrl_mini.estimators
  python -m jaxrl_mini.estimators --advantage group-std rloo --group-size 2 --at 0 50 --plot runs/estimators.svg
  python -m jaxrl_mini.train --seed 7 --trajectories run.npz && python -m jaxrl_mini.estimators --policy run.npz
  python -m jaxrl_mini.estimators --task guess:numbers=4 --at 0

For each policy, advantage and aggregation: the expected gradient of a batch, at the policy that samples it, against
the gradient of the exact success probability. Below them: what the estimators of the KL term follow, against the
gradient of KL(policy || uniform) between whole episodes. Nothing is sampled but the run that the policies come from.

Where a task has several instances, each group plays one of them, and the cosines with the gradients of three means over
the instances are shown, of their success p (cosine), of arcsin(sqrt(p)) (arcsin) and of log(p) (log): for which an
estimator is unbiased.
"""

FILES = (".parquet", ".csv")
PICTURES = (".svg", ".png", ".pdf")
MARK = b"jaxrl_mini estimators"
"""What our own files have in them."""
MAX_ITERATIONS = 10**6
"""Of the run that the policies come from: all of its policies are kept in memory, 600 bytes each."""
ITERATIONS = f"numbers of iterations from 0 to {MAX_ITERATIONS}"


def main(arguments: list[str]) -> None:
    """Parses, judges, prints and writes."""
    parser = commandline.Parser("estimators", description="Judges gradient estimators exactly.", epilog=EXAMPLES)
    known = ", ".join(ADVANTAGES)
    parser.add_argument("--task", default=ARTICLE, metavar="TASK", help="what is done, as train has it [%(default)s]")
    parser.add_argument(
        "--advantage", nargs="+", default=list(ADVANTAGES), help=f"some of {known}, or {OWN_FORM} [all]"
    )
    parser.add_argument("--aggregation", nargs="+", choices=AGGREGATIONS, default=list(AGGREGATIONS), help="[all]")
    parser.add_argument("--groups", type=int, default=4, metavar="INT", help="groups in a batch [4]")
    parser.add_argument("--group-size", type=int, default=8, metavar="INT", help="episodes in a group [8]")
    parser.add_argument("--reward", default="verifier", metavar="STR", help="what the estimators see [verifier]")
    parser.add_argument("--seed", type=int, default=7, metavar="INT", help="the run that the policies come from [7]")
    parser.add_argument(
        "--at", type=int, nargs="+", metavar="ITERATION", default=[0, 10, 20, 100],
        help="judge its policies after so many iterations [0 10 20 100]; 0 is the uniform one",
    )  # fmt: skip
    parser.add_argument(
        "--policy", type=commandline.path, metavar="PATH",
        help="instead, the last policy of a recording (.npz), or one that train --save-policy kept",
    )  # fmt: skip
    parser.add_argument("--step", type=float, default=0.1, metavar="FLOAT", help="length of a step in logits [0.1]")
    parser.add_argument(
        "--output", type=commandline.output, metavar="FILE", default="runs/estimators.parquet",
        help=".parquet or .csv [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=commandline.output, metavar="FILE", help="also draw a picture: .svg, .png or .pdf"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that this command did not write")
    commandline.add_device_flag(parser)
    flags = parser.parse_args(arguments)
    iterations = max(flags.at)
    if min(flags.at) < 0:
        raise UserError(f"--at {min(flags.at)} is out of range: expected {ITERATIONS}")
    if iterations > MAX_ITERATIONS:
        raise UserError(f"--at {iterations} is out of range: expected {ITERATIONS}")
    config = Config(
        task=flags.task, seed=flags.seed, groups=flags.groups, group_size=flags.group_size, reward=flags.reward,
        iterations=max(1, iterations),
    )  # fmt: skip
    flags.advantage = [load_advantage(one) for one in flags.advantage]
    for one in flags.advantage:
        dataclasses.replace(config, advantage=one)  # refuses what is none, or gives no finite numbers
    if flags.reward == "shuffled":
        raise UserError("--reward shuffled depends on the other episodes: expected another reward")
    if not 0 < flags.step < float("inf"):
        raise UserError(f"--step {flags.step} is out of range: expected a number above 0, finite")
    _check_kind("--output", flags.output, FILES)
    if flags.plot is not None:
        _check_kind("--plot", flags.plot, PICTURES)
    commandline.use_device(flags.device)
    from jaxrl_mini.exact import bias, laws, moments
    from jaxrl_mini.machine import files
    from jaxrl_mini.tasks.specification import load_task

    table, drawn = (files.not_marked(mark, "output of this command") for mark in (_mark(flags.output), MARK))
    estimators = [(Variant(*pair), "grpo") for pair in itertools.product(flags.advantage, flags.aggregation)]
    estimators.append((Variant(), "rs-sft"))
    task = load_task(flags.task)
    laws.check_task(task)
    kept = None if flags.policy is None else _kept(flags.policy, flags.task)
    instances = len(task.splits["train"])
    for one in estimators:
        moments.check_size(flags.groups, flags.group_size, *one, steps=task.max_steps, instances=instances)
    with (
        files.Output(flags.output, table, flags.overwrite) as output,
        files.optional_output(flags.plot, drawn, flags.overwrite) as picture,
    ):
        seconds = effort.alone(_default(config)) if flags.policy is None else 0.0
        judged = len(flags.at) if flags.policy is None else 1
        judging = sum(_seconds(*one, flags.groups, flags.group_size, instances) for one in estimators)
        commandline.say_how_long(seconds + judged * judging)
        rows = []
        for name, logits in [kept] if kept else _policies(flags.at, config):
            rows += bias.judge(
                name, logits, task, advantages=flags.advantage, aggregations=flags.aggregation,
                groups=flags.groups, group_size=flags.group_size, reward=flags.reward, step=flags.step,
            )  # fmt: skip
        writes = {flags.output: lambda: output.commit(lambda file: _write(rows, file, Path(flags.output).suffix))}
        if picture is not None:
            kind = Path(flags.plot).suffix[1:]
            writes[flags.plot] = lambda: picture.commit(lambda file: bias.plot(rows, file, kind, MARK.decode()))
        errors = files.write_all(writes)
    commandline.say(bias.as_text(rows))
    for name in dict.fromkeys(row["policy"] for row in rows if math.isnan(row["variance"])):
        commandline.note(f"{name}: - where a probability of 0 in float64 leaves an estimator no figure")
    commandline.note(f"written: {' and '.join(name for name in writes if name not in errors) or 'nothing'}")
    if errors:
        raise UserErrors("not all is written", [*errors.values()])


def _mark(path: str) -> bytes:
    """What a table that this command wrote has in it; a .csv, its first columns."""
    return b'"policy","success","what","advantage","aggregation","kl"' if Path(path).suffix == ".csv" else MARK


def _seconds(estimator: Variant, method: str, groups: int, group_size: int, instances: int) -> float:
    """What judging an estimator takes, about: its sums go over the counts of a group, or those of a batch."""
    of_steps, of_batch = estimator.aggregation == "step-mean", asks_for_batch(formula(estimator.advantage, method))
    episodes, pairs = groups * group_size, instances * (instances + 1) // 2
    if not of_steps and not of_batch:
        return instances * (4e-5 * group_size + 6e-8 * group_size**2)
    each = 4e-5 * episodes + 6e-8 * group_size**2 + 3e-9 * episodes**2
    if of_steps:
        each += 0.03 + group_size**2 * episodes * (3e-6 * episodes if of_batch and groups > 1 else 5e-7)
    return pairs * each


def _check_kind(flag: str, path: str, kinds: tuple[str, ...]) -> None:
    if Path(path).suffix not in kinds:
        raise UserError(f"{flag} {path} has no known ending: expected one of {', '.join(kinds)}")
    if flag == "--plot":
        commandline.quieten("matplotlib")
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise UserError("--plot needs matplotlib: pip install '.[report]' in the source folder") from error


def _kept(path: str, task: str) -> tuple[str, Any]:
    """The name and the logits of a kept policy, or of the last one of a recording.

    Raises:
      UserError: it cannot be read, is no table, or is of another task.
    """
    from jaxrl_mini.policies import saved
    from jaxrl_mini.runs import recording

    if Path(path).is_dir():
        logits, config = saved.load_table(path, [task])
    else:
        found = recording.read(path, [task])
        if "logits" not in found.arrays:
            raise UserError(f"--policy {path} is of a language model: expected a table policy")
        logits, config = found.arrays["logits"][-1], found.config
    if config.task != task:
        raise UserError(f"--policy {path} is of another task: add --task {config.task}")
    return Path(path).name, logits


def _policies(at: list[int], config: Config) -> list[tuple[str, Any]]:
    """Names and logits, after so many iterations of the default run."""
    from jaxrl_mini.learning import loop

    logits = loop.run(_default(config)).logits
    assert logits is not None  # a table's
    return [("uniform" if one == 0 else f"seed {config.seed} after {one}", logits[one]) for one in at]


def _default(config: Config) -> Config:
    """The run that the policies come from."""
    return Config(task=config.task, seed=config.seed, iterations=config.iterations)


def _write(rows: list[dict[str, Any]], file: Any, kind: str) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.Table.from_pylist(rows).replace_schema_metadata({"Software": MARK})
    if kind == ".csv":
        csv.write_csv(table, file)
    else:
        parquet.write_table(table, file, write_page_checksum=True)


if __name__ == "__main__":
    commandline.run_command(main)
