"""Single faults, put into a copy of the package one at a time: which test notices? ``python -m benchmarks.mutations``.

A fault is a text that stands once in a file, and what takes its place: a sign, an axis, a bound, a swapped argument, a
mask or a flush that is left out. The files of tests that should notice are run up to the first failure, without those
marked `full`; where they do not, and ``--all`` is given, all of `make test` is. Prints a line of JSON for each fault;
the exit code is 1 where one went unnoticed. A fault that changes nothing that can be seen does not belong here.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MADE = {"build", "dist", "runs", "sweeps"}
"""Folders of the checkout that are no part of it."""


class Fault(NamedTuple):
    """One text in place of another."""

    file: str
    """Below `jaxrl_mini`, without its ending."""
    old: str
    new: str
    tests: str
    """The files that should notice, the cheapest first, by what follows `test_`."""


_BY_FILE = {
    "objective/advantage": [
        ("xp.sqrt(1.0 / odds), -xp.sqrt(odds)", "xp.sqrt(odds), -xp.sqrt(1.0 / odds)", "objective"),
        ("return ((size - 1) / size) ** 0.5", "return (size / (size - 1)) ** 0.5", "variants"),
        ("size) / (size - 1)", "size) / size", "variants"),
        ("(reward > 0) & some, batch_size", "some, batch_size", "objective"),
        ("rate * (1.0 - rate)", "rate * (1.0 + rate)", "variants"),
    ],
    "objective/credit": [
        ('1.0 if aggregation == "step-mean" else 1.0 / steps)', "1.0)", "moments variants"),
        ("success[:, None], failure[:, None])\n\n", "failure[:, None], success[:, None])\n\n", "objective"),
        ("total(failed + succeeded)", "total(succeeded)", "objective"),
        ("credit.counts, credit.visits * scale", "credit.counts, credit.visits", "variants"),
        ("jnp.where(rewards > 0, 0.0, failure)", "failure", "any_task"),
        ("_whole_shares(steps) >= 1 << _FIELD", "_whole_shares(steps) >= 1 << 2 * _FIELD", "any_task"),
        ("np.int32(len(first)))", "np.int32(len(first) - 1))", "language_training"),
        (
            'variant.aggregation == "step-mean" else steps * count',
            'variant.aggregation == "step-mean" else steps',
            "variants",
        ),
        ("sums[:, 3, None], 0.0).ravel()", "sums[:, 2, None], 0.0).ravel()", "variants language_training"),
    ],
    "objective/kl": [
        (".exp(log_probs) * (log_probs - reference)", ".exp(log_probs) * (reference - log_probs)", "objective"),
        ("return value * (1.0 + log_probs - log_value)", "return terms", "variants"),
        ("return 0.5 * gap * gap", "return gap * gap", "variants"),
        (".exp(-gap) - 1.0 + gap", ".exp(gap) - 1.0 - gap", "variants"),
    ],
    "objective/loss": [
        ("credit, settings.clip, settings.clip_high)", "credit, settings.clip)", "variants"),
        ("(ratio > 1.0 + high)", "(ratio > 1.0 + settings.clip)", "objective"),
        ("return terms + settings", "return terms - settings", "variants"),
        ("if len(array) % 2 else paired", "if len(array) % 2 else array[:half]", "objective"),
        ("credit.counts * outside", "credit.visits[:, None] * outside", "objective"),
    ],
    "objective/surrogates": [
        ("ratio > 1.0 - clip, ratio, 1.0 - clip)", "ratio > 1.0 + clip, ratio, 1.0 + clip)", "objective"),
        ("ratio > DUAL_CLIP, ratio - DUAL_CLIP", "ratio > DUAL_CLIP, ratio", "variants"),
        ("else jax.lax.stop_gradient(ratio)", "else ratio", "variants"),
    ],
    "objective/own": [
        ("hexdigest()[:DIGITS]", "hexdigest()[-DIGITS:]", "own"),
        ("others = (0, (episodes - group_size) // 2, episodes - group_size)", "others = (0,)", "own"),
    ],
    "exact/beliefs": [
        ("min(actions for", "max(actions for", "tasks"),
        ("seen.setdefault(text, set()).add(following)", "seen.setdefault(0, set()).add(following)", "tasks"),
    ],
    "exact/bias": [
        ('sign=-1.0, what="kl"', 'sign=1.0, what="kl"', "estimators"),
        (
            'episodes * found.variance, what="success", advantage=advantage,',
            'found.variance, what="success", advantage=advantage,',
            "estimators",
        ),
    ],
    "exact/expectations": [
        ("= share[parent] * probs[parent,", "= probs[parent,", "histories"),
        ("share[found.mass.history] * found.mass.value", "share[found.mass.history]", "histories"),
    ],
    "exact/expected": [
        ("binomial(others, group_size - 1, rate)", "binomial(others, group_size, rate)", "variants"),
        ("jnp.full_like(rate, others + 1)", "jnp.full_like(rate, others)", "variants"),
        (".sum(axis=1).mean(axis=0)", ".sum(axis=1)[0]", "variants"),
    ],
    "exact/flow": [
        ("(by_step[step] * onward).max(axis=-1)", "(by_step[step] * onward).mean(axis=-1)", "flow"),
        ("through.moves[:, -1].sum(axis=-2)", "through.moves[:, -1].sum(axis=-1)", "flow"),
    ],
    "exact/moments": [
        ("episodes * (group_size - 1) *", "episodes * group_size *", "moments"),
        ("episodes * (episodes - group_size) *", "episodes * (episodes - 1) *", "moments"),
        ("(1.0 - np.exp(-gap)) * rarest", "(np.exp(-gap) - 1.0) * rarest", "moments estimators"),
        ("if i == j else 2)", "if i == j else 1)", "instances"),
    ],
    "exact/laws": [
        ("1.0 - 2.0 * self.probs", "1.0 - self.probs", "moments"),
        ("gained[ends, :, step + 1]", "gained[ends, :, step]", "moments"),
        ("return 1.0 / p if", "return p if", "instances"),
    ],
    "exact/situations": [
        (
            "level.accepted[:, None], level.instance[level.source], size)",
            "level.accepted[:, None], level.instance[level.source] * 0, size)",
            "any_task",
        ),
        (
            "xp.where(_wide(level.target == ENDED, value.ndim), 0.0, value[level.target])",
            "value[level.target]",
            "moments",
        ),
        ("* (views * actions)\n", "* 0\n", "instances"),
    ],
    "exact/success": [
        ("operator.add, mass)", "operator.add, after)", "evaluation"),
    ],
    "tasks/histories": [
        ("won = flow[submits] * task.accepted[", "won = task.accepted[", "histories"),
        ("np.any([np.diff(key, prepend=-1)", "np.all([np.diff(key, prepend=-1)", "histories"),
    ],
    "episodes/rollout": [
        ("(uniforms >= below)", "(uniforms > below)", "rollout"),
        ("xp.where(step & 1, second, first)", "xp.where(step & 1, first, second)", "rollout"),
        ("step >> 1))", "step))", "rollout"),
        ("& accepted[:, variant] for", "& accepted[:, -variant] for", "rollout"),
    ],
    "episodes/rewards": [
        ("verdicts[iteration % len(verdicts)]", "verdicts[0]", "controls rollout"),
        ("uniforms < (noise_of(reward)", "uniforms > (noise_of(reward)", "controls"),
        ("STREAM = 2", "STREAM = 1", "controls"),
        ("noise * (1.0 - 2.0 * passed)", "noise * (1.0 - passed)", "controls"),
    ],
    "episodes/play": [
        (
            'jnp.where(over, submission, jnp.take(handed_in, place, mode="clip"))',
            'jnp.take(handed_in, place, mode="clip")',
            "any_task",
        ),
        ("stream=stream + VERDICT", "stream=stream + CHANCE", "any_task"),
        ("uniforms_of(keys[CHANCE], steps, batch))", "uniforms_of(keys[CHANCE], 0, batch))", "any_task"),
        ("instance[:, None], uniforms_of", "instance[:1, None], uniforms_of", "any_task"),
    ],
    "learning/training": [
        ("jnp.minimum(1.0, MAX_GRADIENT_NORM / (norm + 1e-6))", "MAX_GRADIENT_NORM / (norm + 1e-6)", "training"),
        ("b2=0.999", "b2=0.99", "training"),
        ("after, (params, moments))", "after, (params, after[1]))", "training"),
        (
            "Batch(state.policy.log_probs, reference, credit)",
            "Batch(reference, state.policy.log_probs, credit)",
            "training",
        ),
        ("repeat(sizes.epochs, step", "repeat(1, step", "training"),
        ("total(total(credit.plus)) > 0", "total(total(credit.plus)) >= 0", "training"),
    ],
    "learning/checkpoint": [
        ("<= snapshot.iteration)[:-KEPT]", "<= snapshot.iteration)[: -KEPT - 1]", "checkpoint"),
        ('for path in (*folder.rglob("*"), folder):', 'for path in folder.rglob("*"):', "durability"),
        ("aside.rename(place)\n            flush(self.folder)", "aside.rename(place)", "durability"),
        ("self._deferring = not last", "self._deferring = False", "checkpoint"),
        ("iteration - iteration % self.every + self.every", "iteration + self.every", "checkpoint"),
        ("if last or self._asked is not None or", "if last or", "checkpoint"),
        ("(whole or name == RUN) and", "whole and", "checkpoint"),
        ("sorted(there, reverse=True)", "sorted(there)", "checkpoint"),
        (
            'if not np.array_equal(tree["beginning"], self._beginning)',
            'if not np.array_equal(tree["beginning"], tree["beginning"])',
            "language_training",
        ),
    ],
    "sweeps/dataset": [
        ("            os.fsync(descriptor)\n", "", "durability"),
        ("        files.flush(path.parent)\n        return True", "        return True", "durability"),
        ("if not files.link_new(aside, path):", "if aside.rename(path) is path:", "dataset sweep_command"),
        ('metadata.get(b"sha256") != digest or ', "", "dataset"),
        ("if not self._labels(table, part).equals(", "if False and not self._labels(table, part).equals(", "dataset"),
        ("left[os.write(descriptor, left) :]", "left[os.write(descriptor, left) and len(left) :]", "dataset"),
        ("deciding(one, threads=threads)", "deciding(one, threads=False)", "identity dataset"),
    ],
    "machine/files": [
        ("                os.fsync(file.fileno())\n", "", "durability"),
        ("elif there != self._seen and", "elif there == self._seen and", "outputs"),
        ('getattr(os, "O_NOFOLLOW", 0)', "0", "files"),
        ("errno.EACCES} or not path.is_dir()", "errno.EACCES}", "files"),
        (
            "        if path.exists():\n            return False\n        part.rename",
            "        part.rename",
            "files",
        ),
        ("in reversed(self._made)", "in self._made", "files"),
        ("about.st_size > limit", "about.st_size >= limit", "files"),
    ],
    "policies/prompts": [
        ("visible[node, nodes[prefix[:end]]]", "visible[nodes[prefix[:end]], node]", "language"),
        ("row[len(row) - len(ids) :] = ids", "row[: len(ids)] = ids", "language"),
        ("+ int(tree.depths.max())", "+ int(tree.depths.min())", "language"),
        ("reached = longest[task.node[onward]] +", "reached =", "language_any_task"),
    ],
    "policies/language": [
        ("offsets >= -lengths[..., None]", "offsets > -lengths[..., None]", "language"),
        ("tree.depths - 1", "tree.depths", "language"),
        ("earlier = np.arange(slots) < width", "earlier = np.arange(slots) <= width", "language"),
        ("                context.length + lengths,\n", "                context.length,\n", "language"),
        ("jnp.where(alive, choice, -1)", "choice", "language"),
        ("context.length + own.sum(1)", "context.length", "language"),
        ("start.chances[step][:, None] >= bounds", "start.chances[step][:, None] > -bounds", "language_any_task"),
        ("(uniforms[..., None] >= cumulative)", "(uniforms[..., None] > cumulative)", "language"),
        ("jnp.where(alive[:, None], log_probs, 0)", "log_probs", "language"),
        ("longest > bound", "longest >= bound", "language_any_task"),
    ],
}
FAULTS = [Fault(file, *one) for file, faults in _BY_FILE.items() for one in faults]


def _left(place: str, names: list[str]) -> set[str]:
    """What is not copied of a folder."""
    made = MADE if Path(place) == ROOT else set()
    return {name for name in names if name.startswith(".") or name in made or name == "__pycache__"}


def put(fault: Fault, package: Path) -> tuple[Path, str]:
    """Puts a fault into a package; returns the file, and what stood there before.

    Raises:
      ValueError: the old text is not there exactly once.
    """
    path = package / f"{fault.file}.py"
    before = path.read_text()
    if before.count(fault.old) != 1:
        raise ValueError(f"{fault.file}.py has {fault.old!r} {before.count(fault.old)} times: expected once")
    path.write_text(before.replace(fault.old, fault.new))
    return path, before


def first_failure(copy: Path, tests: list[str]) -> str | None:
    """The first of the tests that fails, or the end of what was said where they could not be run."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "JAX_COMPILATION_CACHE_DIR": str(copy / "compiled")}
    options = ["-x", "-q", "-n0", "-m", "not full", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else (done.stdout + done.stderr)[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of faults, from 0 [all]")
    parser.add_argument(
        "--all", action="store_true", help="where the named files notice nothing, run all of `make test`"
    )
    flags = parser.parse_args()
    unnoticed = 0
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "jaxrl_mini"
        shutil.copytree(ROOT, copy, ignore=_left)
        for fault in FAULTS:  # before the first is tried
            path, before = put(fault, copy / "jaxrl_mini")
            path.write_text(before)
        for number in flags.only or range(len(FAULTS)):
            fault, started = FAULTS[number], time.perf_counter()
            path, before = put(fault, copy / "jaxrl_mini")
            named = [f"tests/test_{name}.py" for name in fault.tests.split()]
            noticed = first_failure(copy, named) or (first_failure(copy, ["tests"]) if flags.all else None)
            path.write_text(before)
            unnoticed += noticed is None
            row = {"number": number, "file": f"{fault.file}.py", "old": fault.old, "new": fault.new, "noticed": noticed}
            print(json.dumps({**row, "seconds": round(time.perf_counter() - started, 1)}), flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
