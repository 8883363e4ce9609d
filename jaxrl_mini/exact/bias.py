"""How far each estimator's expected gradient is from the exact one: rows of figures, a table, a plot."""

import itertools
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
from jaxtyping import Float
from scipy.special import log_softmax

from jaxrl_mini.config import KLS, Variant
from jaxrl_mini.exact import laws, moments, situations
from jaxrl_mini.exact.moments import Moments
from jaxrl_mini.tasks.compiled import CompiledTask

Row = dict[str, Any]
"""See `judge`."""
FLAT = 1e-14
"""Below this, what is left of a gradient of 0 is rounding."""
UNBIASED = 1.0 - 1e-9
"""A cosine from which on rounding is all that keeps two directions apart."""


def judge(
    name: str,
    logits: Float[np.ndarray, "context action"],
    task: CompiledTask,
    *,
    advantages: Sequence[str],
    aggregations: Sequence[str],
    groups: int,
    group_size: int,
    reward: str = "verifier",
    step: float = 0.1,
) -> list[Row]:
    """Judges estimators at a policy, exactly; every group plays an instance of the split `train`, all as likely.

    Args:
      name: of the policy.
      logits: the policy.
      task: what it plays.
      advantages: of `config.ADVANTAGES`, each with each aggregation; rejection sampling is judged too.
      aggregations: of `config.AGGREGATIONS`.
      groups: in a batch.
      group_size: episodes in a group.
      reward: what the estimator sees; the truth is always the verifier's.
      step: length of the step in the space of the logits.

    Returns:
      A row per estimator: policy, success (exact), what (`success`: compared with the gradient of the success
      probability; `kl`: with that of KL(policy || uniform) between whole episodes, without advantage), advantage,
      aggregation, kl, size (norm of the expected gradient by that of the exact one), cosine and angle in degrees
      (between the two; NaN where one of them is 0), variance (trace of the covariance, of a batch, times its episodes),
      signal_to_noise (norm of the expected gradient by the root of that variance), gain (what the step of that length
      along the expected gradient adds to the exact success; against it, for a `kl` row). All of these are NaN where a
      probability underflows to 0 and the expectation does not follow from p log p being 0 there: for k3. Then
      cosine_arcsin and cosine_log, with the gradients of the other objectives of `laws.OBJECTIVES`, and unbiased, the
      names of those whose cosine is 1 but for rounding; NaN and nothing for a `kl` row. At last the instances.

    Raises:
      UserError: the task is too large, or the batch is.
    """
    log_probs = log_softmax(np.asarray(logits, np.float64), axis=1)
    truth = laws.laws_of(task, log_probs)
    seen = laws.laws_of(task, log_probs, reward)
    before = laws.mean_success(truth)
    by_objective = {objective: laws.objective_gradient(truth, objective) for objective in laws.OBJECTIVES}
    rows, episodes = [], groups * group_size

    def add(exact: np.ndarray, found: Moments, variance: float, sign: float = 1.0, **labels: str) -> None:
        size, norm = np.linalg.norm(exact), np.linalg.norm(found.mean)
        cosine = _cosine(found.mean, exact)
        others = {
            name: _cosine(found.mean, one) if labels["what"] == "success" else np.nan
            for name, one in by_objective.items()
        }
        after = logits + sign * step * found.mean / norm if norm else logits
        gain = float(situations.exact_of_logits(task, after, "train").success_rate) - before
        rows.append(
            {
                "policy": name,
                "success": before,
                **labels,
                "size": float(norm / size) if size else np.nan,
                "cosine": cosine,
                "angle": float(np.degrees(np.arccos(cosine))),
                "variance": variance,
                "signal_to_noise": float(norm / variance**0.5) if variance > 0 else np.nan,
                "gain": 0.0 if norm < FLAT else gain,
                **{f"cosine_{name}": others[name] for name in laws.OBJECTIVES[1:]},
                "unbiased": ", ".join(name for name in laws.OBJECTIVES if others[name] > UNBIASED),
                "instances": len(truth),
            }
        )

    for advantage, aggregation in itertools.product(advantages, aggregations):
        found = moments.batch_moments(seen, groups, group_size, Variant(advantage, aggregation))
        add(by_objective["success"], found, episodes * found.variance, what="success", advantage=advantage,
            aggregation=aggregation, kl="")  # fmt: skip
    found = moments.batch_moments(seen, groups, group_size, Variant(), "rs-sft")
    add(by_objective["success"], found, episodes * found.variance, what="success", advantage="rs-sft",
        aggregation="episode-mean", kl="")  # fmt: skip
    reference = np.full(log_probs.shape, -np.log(log_probs.shape[1]))
    exact = moments.episode_kl_gradient(task, np.exp(log_probs), reference)
    for kl, aggregation in itertools.product(KLS, [one for one in aggregations if one != "step-mean"]):
        found = moments.kl_moments(truth, reference, kl, aggregation, group_size)
        add(exact, found, found.variance, sign=-1.0, what="kl", advantage="", aggregation=aggregation, kl=kl)
    return rows


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    sizes = np.linalg.norm(one), np.linalg.norm(other)
    return np.nan if min(sizes) < FLAT else float(np.clip((one * other).sum() / (sizes[0] * sizes[1]), -1.0, 1.0))


def as_text(rows: Sequence[Row]) -> str:
    """The rows as a table for people; with the cosines to the other objectives, where instances tell these apart."""
    several = any(row["instances"] > 1 for row in rows)
    columns = {"size": 4, "cosine": 6, "angle": 2, "variance": 5, "signal_to_noise": 3}
    head = [
        "policy",
        "success",
        "of",
        "estimator",
        "aggregation",
        "size",
        "cosine",
        "angle",
        "variance",
        "signal",
        "gain",
    ]
    table = [[*head, *["arcsin", "log", "unbiased"] * several]]
    for row in rows:
        cells = [row["policy"], f"{row['success']:.4f}", row["what"], row["advantage"] or row["kl"], row["aggregation"]]
        cells += [_number(row[name], digits) for name, digits in columns.items()]
        cells += [_number(row["gain"], 5, sign="+")]
        if several:
            cells += [_number(row[f"cosine_{name}"], 6) for name in laws.OBJECTIVES[1:]]
            cells += [row["unbiased"].replace(", ", "/") or "-"]
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def _number(value: float, digits: int, sign: str = "-") -> str:
    return "-" if np.isnan(value) else f"{value:{sign}.{digits}f}"


def plot(rows: Sequence[Row], file: IO[bytes], kind: str, software: str) -> None:
    """Angle and signal of the estimators of success, a point per policy, as a picture; needs matplotlib.

    Args:
      rows: of `judge`.
      file: takes the picture.
      kind: svg, png or pdf.
      software: what the picture says that it was made with.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["what"] == "success"]
    labels = list(dict.fromkeys(f"{row['advantage']}, {row['aggregation']}" for row in shown))
    figure = Figure(figsize=(10, 1.5 + 0.28 * len(labels)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for policy in dict.fromkeys(row["policy"] for row in shown):
        mine = [row for row in shown if row["policy"] == policy]
        places = [labels.index(f"{row['advantage']}, {row['aggregation']}") for row in mine]
        title = f"{policy} (success {mine[0]['success']:.3f})"
        left.plot([row["angle"] for row in mine], places, "o", label=title, alpha=0.8)
        right.plot([row["signal_to_noise"] for row in mine], places, "o", alpha=0.8)
    left.set_yticks(range(len(labels)), labels)
    left.invert_yaxis()
    left.set_xlabel("degrees between expected and exact gradient")
    right.set_xlabel("signal to noise, per episode")
    right.set_xscale("log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, fontsize="small")
    figure.savefig(file, format=kind, metadata={"Software" if kind == "png" else "Creator": software})
