"""The report: runs and sweeps as one page that a newcomer can read and that fetches nothing from anywhere."""

import base64
import hashlib
import itertools
import json
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from jaxrl_mini.config import ARTICLE
from jaxrl_mini.exact import flow
from jaxrl_mini.exact.flow import LAYOUT, MOVES, SCALE
from jaxrl_mini.machine import commandline
from jaxrl_mini.machine.commandline import file_flag
from jaxrl_mini.pages import figures
from jaxrl_mini.pages.figures import METRICS, SOFTWARE, Curves
from jaxrl_mini.pages.sources import Source
from jaxrl_mini.runs.recording import Recording
from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.repair import (
    ACTIONS,
    EXTRA_TARGETS,
    FIXED_ARRAYS,
    MAX_STEPS,
    NUM_ACTIONS,
    NUM_VARIANTS,
    VARIANTS,
    Artifact,
    BinarySearchRepair,
    binary_search,
    public_test_passes,
)  # fmt: skip
from jaxrl_mini.tasks.retelling import retold

MOST_FRAMES = 600
"""Policies in a page, over all of its runs: about 600 bytes each."""

MOST_SETTINGS = 12
"""Settings of a sweep whose curves are drawn; its table names all."""

EPISODES = 4
"""Episodes shown of the first batch and of the last: the first of so many groups."""

ABOUT = {
    "loss": "What the optimizer lowers. It is no measure of success: for grpo with its default settings it starts near "
    "zero by construction, and what is left at the end is mostly the penalty for having moved away from the initial "
    "policy.",
    "mean_kl": "How far the policy has moved from the one it started as, averaged over the sampled actions.",
    "entropy": "How undecided the policy is where it acts: 1.79 nats is the throw of a die, 0 is certainty.",
    "ratio_outside_clip_fraction": "Share of the sampled actions whose probability one iteration changed by more than "
    "the clip allows; beyond it they no longer pull in the direction they were going.",
    "mixed_groups": "Groups with successes and failures both. Only these tell better actions from worse ones; "
    "when every episode of a group succeeds, there is nothing left to compare.",
    "gradient_norm": "How strongly the batch pulls, before the pull is limited to a length of 1.",
}

VARIANT_NAMES = ("neither", "high", "low", "both")
"""Which of the two lines are repaired."""


def render(sources: list[Source], more: Sequence[str] = ()) -> str:
    """The page as HTML.

    Args:
      sources: what is on it.
      more: the words after these in the command that makes it.
    """
    css, script = (_template(name) for name in ("report.css", "report.js"))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxrl_mini.pages", "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "percent": percent, "number": number, "percents": percents, "numbers": numbers,
        "count": commandline.counted, "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "product": itertools.product, "level": lambda thousandths: (thousandths + 50) // 100,
    }  # fmt: skip
    unrecorded = [
        source for source in sources
        if source.config is not None and source.config.backend == "table" and not source.config.exact_gradient
        and source.recording is None
    ]  # fmt: skip
    drawn = [one for source in sources for one in source.curves[:MOST_SETTINGS]]
    with_lines = [one for one in drawn if one.lines]
    recordings = [(source, source.recording) for source in sources if source.recording is not None]
    tasks = list(dict.fromkeys(task for source in sources for task in source.tasks))
    most = max(2, MOST_FRAMES // max(1, len(recordings)))
    recorded = [
        {
            "source": source, "batches": [describe_batch(recording, at) for at in (0, recording.config.iterations - 1)],
            "policy": _policy(recording, i, most) if "logits" in recording.arrays and recording.task is None else None,
        }
        for i, (source, recording) in enumerate(recordings)
    ]  # fmt: skip
    return environment.get_template("report.html").render(
        generator=SOFTWARE, css=Markup(css), script=Markup(script), css_hash=_hash(css), script_hash=_hash(script),
        sources=sources, runs=[source for source in sources if source.config is not None],
        sweeps=[source for source in sources if source.summary is not None],
        curves=with_lines, panels=_panels(with_lines), about=ABOUT, metrics=METRICS,
        final=[(one, _svg(figures.final_panel(one), f"final{i}-", _final_title(one)))
               for i, one in enumerate(drawn) if one.final is not None],
        recorded=recorded, policies=[one for one in recorded if one["policy"]],
        unrecorded=unrecorded, recording_command=_recording_command, report_command=_report_command(sources, [], more),
        complete_command=_report_command(sources, [_recording_name(source.name) for source in unrecorded], more),
        artifacts=artifacts() if ARTICLE in tasks else [], others=[task for task in tasks if task != ARTICLE],
        actions=ACTIONS, most_settings=MOST_SETTINGS,
    )  # fmt: skip


def _template(name: str) -> str:
    return resources.files("jaxrl_mini.pages").joinpath("templates", name).read_text("utf-8")


def _hash(text: str) -> str:
    """What a content security policy allows a script or a style by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def percent(value: float | None, digits: int = 1) -> str:
    """A share as percent."""
    return "unknown" if value is None else f"{100 * value:.{digits}f} %"


def percents(pair: list[float] | None, digits: int = 1, absent: str = "unknown") -> str:
    """An interval of shares."""
    return absent if pair is None else f"{100 * pair[0]:.{digits}f} to {100 * pair[1]:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many decimals."""
    return "unknown" if value is None else f"{value:.{digits}f}"


def numbers(pair: list[float] | None, digits: int = 3) -> str:
    """An interval of numbers."""
    return "unknown" if pair is None else f"{pair[0]:.{digits}f} to {pair[1]:.{digits}f}"


def _svg(figure: Figure, prefix: str, title: str) -> Markup:
    return Markup(figures.to_svg(figure, prefix, title))


def _final_title(curves: Curves) -> str:
    return f"Exact success of {commandline.counted(curves.runs, 'run')} after training"


def _panels(curves: list[Curves]) -> dict[str, list[Markup]]:
    """Of each metric, a drawing for each run or setting, all on common axes."""
    found = {}
    for metric, name in METRICS.items() if curves else ():
        drawn = figures.panels(curves, metric)
        found[metric] = [
            _svg(figure, f"{metric}{i}-", f"{name} over the iterations, {one.label}. {_in_words(one, metric)}")
            for i, (figure, one) in enumerate(zip(drawn, curves, strict=True))
        ]
    return found


def _in_words(curves: Curves, metric: str) -> str:
    line = curves.lines[metric]
    middle = line.values[len(line.values) // 2]
    what = "It" if len(line.values) == 1 else "The median"
    if not len(middle):
        return "Nothing is known."
    low, high = (int(line.iterations[i]) for i in (0, -1))
    return f"{what} goes from {middle[0]:.4g} at iteration {low} to {middle[-1]:.4g} at iteration {high}."


def _recording_command(source: Source) -> str:
    assert source.config is not None
    files = *file_flag("--output", source.name), *file_flag("--trajectories", _recording_name(source.name))
    return commandline.train_command(source.config, *files)


def _recording_name(record_name: str) -> str:
    return str(Path(record_name).with_suffix(".npz"))


def _report_command(sources: list[Source], recordings: list[str], more: Sequence[str]) -> str:
    names = [name for source in sources for name in (source.name, source.recording_name) if name] + recordings
    words = [f"./{name}" if name.startswith("-") else name for name in names]
    return shlex.join(["python", "-m", "jaxrl_mini.report", *words, *more])


def artifacts() -> list[dict[str, Any]]:
    """The four artifacts, what the public test says of each, and what the private verifier finds."""
    return [
        {
            "lines": artifact.lines, "name": VARIANT_NAMES[artifact.variant], "public": public_test_passes(artifact),
            "fault": fault(artifact),
        }
        for artifact in VARIANTS
    ]  # fmt: skip


def fault(artifact: Artifact) -> str | None:
    """The first of the verifier's fixed checks that an artifact fails, in words; None for the repaired one.

    The fixed arrays are among the inputs of every verdict, so an artifact that fails here always fails; the repaired
    one is the textbook search, which passes on all inputs.
    """
    for values in FIXED_ARRAYS:
        for target in (*values, *EXTRA_TARGETS):
            expected = values.index(target) if target in values else -1
            found = binary_search(artifact, values, target)
            if found != expected:
                what = "never ends" if found is None else f"returns {found} instead of {expected}"
                return f"the search for {target} in {list(values)} {what}"
    return None


def _policy(recording: Recording, place: int, most: int) -> dict[str, Any]:
    """A table policy as it formed: its frames, and how they are laid out."""
    accepted = np.array([fault(artifact) is None for artifact in VARIANTS], float)
    frames = flow.frames(recording.arrays["logits"], accepted, most)
    ends = np.cumsum(list(LAYOUT.values())).tolist()
    starts = dict(zip(LAYOUT, [0, *ends], strict=False))
    public = frames.values[:, starts["submitted"]] / SCALE
    private = frames.values[:, starts["success"]] / SCALE
    chart = figures.public_panel(frames.iterations.astype(float), public, private)
    data = {
        "iterations": frames.iterations.tolist(),
        "frames": frames.values.tolist(),
        "likeliest": [[round(100 * one.probability, 1), "".join(map(str, one.actions))] for one in frames.likeliest],
        "submitted": starts["submitted"],
        "success": starts["success"],
        "actions": ACTIONS,
    }
    best = frames.likeliest[-1]
    return {
        "place": place,
        "data": Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")),
        "values": frames.values[-1].tolist(),
        "last": len(frames.iterations) - 1,
        "iteration": int(frames.iterations[-1]),
        "every": len(frames.iterations) == len(recording.arrays["logits"]),
        "likeliest": (f"{100 * best.probability:.1f}", [ACTIONS[action] for action in best.actions]),
        "starts": starts,
        "diagram": _diagram(starts),
        "states": [
            {
                "step": step, "variant": variant, "visits": starts["visits"] + 4 * step + variant,
                "cells": range(first := starts["policy"] + NUM_ACTIONS * (4 * step + variant), first + NUM_ACTIONS),
            }
            for step in range(MAX_STEPS) for variant in range(NUM_VARIANTS)
        ],
        "variant_names": VARIANT_NAMES,
        "chart": _svg(chart, f"public{place}-", "Shares of episodes over the iterations: handed in, and repaired"),
    }  # fmt: skip


COLUMN, ROW, NODE, LEFT, TOP = 104, 122, (60, 36), 78, 44
"""The diagram's measures, in its own units: between steps, between artifacts, the box of a state, and the margins."""


def _diagram(starts: dict[str, int]) -> dict[str, Any]:
    """Where the boxes and bands of the flow lie, each with the place of its number in a frame."""
    width, height = NODE

    def corner(step: int, variant: int) -> tuple[int, int]:
        return LEFT + COLUMN * step, TOP + ROW * variant

    nodes, submissions, bands = [], [], []
    for step, variant in np.ndindex(MAX_STEPS + 1, NUM_VARIANTS):
        x, y = corner(step, variant)
        index = starts["visits"] + 4 * step + variant if step < MAX_STEPS else starts["out_of_steps"] + variant
        nodes.append({"x": x, "y": y, "index": index})
        if step < MAX_STEPS:
            place = {"x": x + width // 2, "y": y + height, "index": starts["submissions"] + 4 * step + variant}
            submissions.append({**place, "right": variant == NUM_VARIANTS - 1})
    for i, (step, variant, target) in enumerate(MOVES):
        (x, y), (to_x, to_y) = corner(step, variant), corner(step + 1, target)
        x, y, to_y, middle = x + width, y + height // 2, to_y + height // 2, (x + width + to_x) // 2
        path = f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
        bands.append({"path": path, "index": starts["moves"] + i})
    size = (LEFT + COLUMN * MAX_STEPS + width + 24, TOP + ROW * NUM_VARIANTS - ROW // 4)
    heads = [(corner(step, 0)[0] + width // 2, f"step {step + 1}") for step in range(MAX_STEPS)]
    heads.append((corner(MAX_STEPS, 0)[0] + width // 2, "out of steps"))
    return {
        "nodes": nodes,
        "submissions": submissions,
        "bands": bands,
        "size": size,
        "heads": heads,
        "top": TOP,
        "row": ROW,
    }


def describe_batch(recording: Recording, iteration: int) -> dict[str, Any]:
    """A batch's counts, and the first episode of its first groups, step by step."""
    actions, rewards = recording.arrays["actions"][iteration], recording.arrays["rewards"][iteration]
    if recording.task is None:
        played = [play(row) for row in actions.reshape(-1, MAX_STEPS)]
    else:
        played = _retold(recording, recording.task, iteration)
    submitted = [one for one in played if one["submitted"]]
    shown = range(0, min(EPISODES, len(actions)) * actions.shape[1], actions.shape[1])
    return {
        "iteration": iteration,
        "episodes": len(played),
        "submitted": len(submitted),
        "public": sum(one["public"] for one in submitted),
        "private": sum(one["private"] for one in submitted),
        "task": recording.config.task,
        "shown": [{**played[i], "reward": int(rewards.flat[i])} for i in shown],
    }


def _retold(recording: Recording, task: CompiledTask, iteration: int) -> list[dict[str, Any]]:
    """The same of the first episode of each group of any task; of the others, only whether they handed something in."""
    contexts, actions = (one[iteration] for one in recording.places)
    submissions, found = recording.arrays["submissions"][iteration], list[dict[str, Any]]()
    for group, episode in np.ndindex(submissions.shape):
        submitted = int(submissions[group, episode])
        found.append({"submitted": submitted > 0, "public": False, "private": False, "lines": ()})
        if episode == 0 and group < EPISODES:
            taken = actions[group, episode][actions[group, episode] >= 0].tolist()
            instance = int(recording.arrays["instances"][iteration, group])
            first, *after = retold(task, instance, contexts[group, episode].tolist(), taken, submitted)
            found[-1] |= {"first": first, "steps": [*zip([task.actions[one] for one in taken], after, strict=True)]}
            found[-1]["instance"] = task.instances[instance] if len(task.splits["train"]) > 1 else None
    return found


def play(actions: np.ndarray) -> dict[str, Any]:
    """Plays recorded actions, -1 after the end, through the task, and says what the agent saw."""
    task = BinarySearchRepair()
    first = task.reset()
    steps = [(ACTIONS[action], task.step(ACTIONS[action])) for action in actions.tolist() if action >= 0]
    return {
        "first": first, "steps": steps, "submitted": task.submitted, "lines": task.artifact.lines,
        "public": public_test_passes(task.artifact), "private": fault(task.artifact) is None,
    }  # fmt: skip
