"""Learning curves: a run's, or the quantiles of a sweep's runs, side by side; as SVG inside a page or as PNG."""

import io
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.episodes.intervals import success_interval
from jaxrl_mini.exact.flow import evenly
from jaxrl_mini.types import ByContent

if TYPE_CHECKING:
    from jaxrl_mini.sweeps.dataset import Dataset

SUCCESS = "exact_success_rate"
METRICS = {
    SUCCESS: "success",
    "loss": "loss",
    "mean_kl": "KL to the start (nats)",
    "entropy": "entropy (nats)",
    "ratio_outside_clip_fraction": "share outside the clip",
    "mixed_groups": "mixed groups",
    "gradient_norm": "gradient norm",
}
"""The metrics that are drawn, each with the name of its axis."""

LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
"""The quantiles of a sweep's curves."""

MOST_POINTS = 400
"""Points of a curve at most; of a longer history they are taken evenly."""

LINE, SAMPLED = "#2a78d6", "#c4600c"
"""Colors with a contrast of 3 or more to a white and to a nearly black page."""

INK = "#000000"
"""The color of text and frames, which inside a page becomes the page's own."""

PANEL = (4.2, 2.7)
"""Inches."""


class Line(NamedTuple):
    """A curve over iterations: its values, or the quantiles `LEVELS`."""

    iterations: Float[np.ndarray, " point"]
    values: Float[np.ndarray, "level point"]


class Sampled(NamedTuple):
    """Sampled success rates with their 95 % intervals."""

    iterations: Float[np.ndarray, " point"]
    rates: Float[np.ndarray, " point"]
    low: Float[np.ndarray, " point"]
    high: Float[np.ndarray, " point"]


@dataclass(frozen=True, eq=False)
class Curves(ByContent):
    """What is drawn of one run, or of the runs of one setting."""

    label: str
    runs: int
    lines: dict[str, Line]
    """By metric. Success is that of the policy after so many iterations; the others are the iteration's own."""
    batches: Sampled | None = None
    """Success of each iteration's episodes, of a single run."""
    evaluations: Sampled | None = None
    """Success of the evaluation episodes before and after training, of a single run."""
    final: Float[np.ndarray, " run"] | None = None
    """Exact success of each run after training; 0 for a run whose numbers left the finite ones."""


def curves_of_record(record: dict[str, Any], label: str) -> Curves:
    """The curves of a run record.

    Raises:
      UserError: its history or evaluations lack a figure or hold something else than numbers.
    """
    config = Config.from_dict(record["config"])
    history = record["history"]
    if not history or not all(isinstance(row, dict) for row in history):
        raise UserError(f"record {label}: its history is no list of iterations")
    columns = {name: _column(history, name, f"record {label}: history") for name in (*METRICS, "train_success_rate")}
    ends = [record.get(when) for when in ("before", "after")]
    if not all(isinstance(one, dict) for one in ends):
        raise UserError(f"record {label} lacks its evaluation before or after training")
    names = (SUCCESS, "successes", "episodes")
    exact, successes, episodes = (_column(ends, name, f"record {label}: evaluation") for name in names)
    iterations = np.arange(len(history), dtype=float)
    lines = {name: _thinned(iterations, column[None]) for name, column in columns.items() if name in METRICS}
    success = np.append(exact[0], columns[SUCCESS])
    known = np.flatnonzero(np.isfinite(success))  # a language model's is computed every few iterations
    lines[SUCCESS] = _thinned(known.astype(float), success[None, known])
    kept = evenly(len(history), MOST_POINTS)
    batch = np.full(len(kept), float(config.groups * config.group_size))
    batches = _with_intervals(iterations[kept], columns["train_success_rate"][kept] * batch, batch, label)
    evaluations = _with_intervals(np.array([0.0, len(history)]), successes, episodes, label)
    return Curves(label, 1, lines, batches, evaluations)


def curves_of_sweep(dataset: "Dataset", labels: list[str]) -> list[Curves]:
    """The curves of a sweep's runs as far as they are there, one per setting with any.

    Where no history is kept, they have no lines.

    Args:
      dataset: an open sweep folder.
      labels: what to call each of its settings.
    """
    runs = dataset.runs(["setting", "finite", "before_exact_success_rate", "after_exact_success_rate"])
    settings, finite, before, after = (column.to_numpy() for column in runs.columns)
    after = np.where(finite, after, 0.0)
    history = dataset.history(["setting", "iteration", *METRICS])
    columns = {name: history[name].to_numpy() for name in history.column_names}
    order = np.lexsort((columns["iteration"], columns["setting"]))
    columns = {name: column[order] for name, column in columns.items()}
    found = []
    for setting in np.unique(settings):
        mine, rows = settings == setting, slice(*np.searchsorted(columns["setting"], [setting, setting + 1]))
        kept = np.unique(columns["iteration"][rows])
        lines = {}
        for name in METRICS if len(kept) else ():
            values, iterations = columns[name][rows].reshape(len(kept), -1).astype(np.float64), kept
            if name == SUCCESS:  # what is no number where it was evaluated belongs to a failed run
                evaluated = dataset.grid.settings[setting].evaluates(kept)
                values = np.vstack([before[mine], np.nan_to_num(values[evaluated])])
                iterations = np.append(0, kept[evaluated] + 1)
            places = evenly(len(iterations), MOST_POINTS)
            lines[name] = Line(iterations[places].astype(float), _quantiles(values[places]))
        found.append(Curves(labels[setting], int(mine.sum()), lines, final=after[mine]))
    return found


def _column(rows: list[Any], name: str, where: str) -> Float[np.ndarray, " row"]:
    """A column of numbers, NaN for null."""
    values = [row.get(name, "missing") for row in rows]
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UserError(f"{where} has {name} {value!r}: expected a number or null")
    try:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    except OverflowError as error:
        raise UserError(f"{where} has a {name} that is too large") from error


def _with_intervals(
    iterations: Float[np.ndarray, " point"],
    successes: Float[np.ndarray, " point"],
    episodes: Float[np.ndarray, " point"],
    label: str,
) -> Sampled:
    if not ((successes >= 0) & (successes <= episodes + 1e-6) & (episodes >= 1)).all():
        raise UserError(f"record {label}: success counts lie outside 0 to the number of episodes")
    whole = np.rint(successes)
    bounds = [success_interval(int(k), int(n)) for k, n in zip(whole, episodes, strict=True)]
    low, high = np.transpose(bounds)
    return Sampled(iterations, whole / episodes, low, high)


def _thinned(iterations: Float[np.ndarray, " point"], values: Float[np.ndarray, "level point"]) -> Line:
    places = evenly(len(iterations), MOST_POINTS)
    return Line(iterations[places], values[:, places])


def _quantiles(values: Float[np.ndarray, "point run"]) -> Float[np.ndarray, "level point"]:
    """The quantiles `LEVELS` over the runs whose value is finite; NaN where there is none."""
    finite = np.isfinite(values)
    if finite.all():
        return np.quantile(values, LEVELS, axis=1)
    rows = zip(values, finite, strict=True)
    return np.transpose([np.quantile(row[known], LEVELS) if known.any() else [np.nan] * 5 for row, known in rows])


# Drawing


def draw(axes: Axes, curves: Curves, metric: str) -> None:
    """Draws a metric: a run's line, or a sweep's median with bands of half and of 95 % of the runs."""
    axes.set_xlabel("iteration")
    axes.set_ylabel(METRICS[metric])
    axes.grid(visible=True, color="#808080", alpha=0.3, linewidth=0.6)
    line = curves.lines[metric]
    single = len(line.values) == 1
    if metric == SUCCESS:
        axes.set_ylim(-0.02, 1.02)
        if curves.batches is not None:
            batch = curves.batches
            axes.fill_between(batch.iterations, batch.low, batch.high, color=SAMPLED, alpha=0.22, linewidth=0)
            axes.plot(
                batch.iterations, batch.rates, ".", color=SAMPLED, markersize=3, label="sampled batch, 95 % interval"
            )
        if curves.evaluations is not None:
            one = curves.evaluations
            spread = (np.maximum(one.rates - one.low, 0.0), np.maximum(one.high - one.rates, 0.0))
            axes.errorbar(one.iterations, one.rates, spread, fmt="D", color=SAMPLED, markersize=4, capsize=4,
                          label="sampled evaluation, 95 % interval")  # fmt: skip
    if not single:
        for outer, alpha, label in ((0, 0.25, "95 % of the runs"), (1, 0.4, "half of the runs")):
            low, high = line.values[outer], line.values[-1 - outer]
            axes.fill_between(line.iterations, low, high, color=LINE, alpha=alpha, linewidth=0, label=label)
    middle = line.values[len(line.values) // 2]
    label = "exact" if single and metric == SUCCESS else "median"
    marker = "o" if len(middle) < 20 else None
    axes.plot(line.iterations, middle, color=LINE, linewidth=1.8, marker=marker, markersize=3, label=label)
    if metric == SUCCESS:
        axes.legend(loc="lower right", fontsize=8, frameon=False)
    elif metric != "loss":
        axes.set_ylim(bottom=0)
    if metric == "mixed_groups":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def draw_final(axes: Axes, curves: Curves) -> None:
    """Draws how the runs' exact success after training is distributed."""
    assert curves.final is not None
    axes.hist(curves.final, bins=50, color=LINE)
    axes.set_xlabel("exact success after training")
    axes.set_ylabel("runs")
    axes.grid(visible=True, axis="y", color="#808080", alpha=0.3, linewidth=0.6)


def side_by_side(every: list[Curves], metric: str) -> Figure:
    """A figure with a panel for each, on common axes and with its label above it."""
    columns = 2 if len(every) == 4 else min(len(every), 3)
    rows = -(-len(every) // columns)
    figure = _figure(columns, rows)
    shared = metric != "loss"
    places = figure.subplots(rows, columns, sharex=True, sharey=shared, squeeze=False).ravel().tolist()
    for axes, curves in zip(places, every, strict=False):
        draw(axes, curves, metric)
        axes.set_title(curves.label, fontsize=9, parse_math=False)
        if shared:
            axes.label_outer()
    for axes in places[max(0, len(every) - columns) : len(every)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("iteration")
    for axes in places[len(every) :]:
        axes.set_axis_off()
    if not shared:
        figure.subplots_adjust(wspace=0.26)
    return figure


def panels(every: list[Curves], metric: str) -> list[Figure]:
    """The same as a figure each, for a page that arranges them itself; what is to be compared has common axes."""
    found = []
    for curves in every:
        found.append(_figure(1, 1))
        draw(found[-1].subplots(), curves, metric)
    axes = [figure.axes[0] for figure in found]
    for name in ("xlim",) if metric == "loss" else ("xlim", "ylim"):  # two methods' losses are not to be compared
        limits = [getattr(one, f"get_{name}")() for one in axes]
        for one in axes:
            getattr(one, f"set_{name}")(min(low for low, _ in limits), max(high for _, high in limits))
    return found


def final_panel(curves: Curves) -> Figure:
    """`draw_final` as a figure."""
    figure = _figure(1, 1)
    draw_final(figure.subplots(), curves)
    return figure


def public_panel(
    iterations: Float[np.ndarray, " point"], public: Float[np.ndarray, " point"], private: Float[np.ndarray, " point"]
) -> Figure:
    """The shares of episodes that pass the public test and the private verifier, and between them what misleads."""
    figure = _figure(1, 1)
    axes = figure.subplots()
    axes.fill_between(iterations, private, public, color=SAMPLED, alpha=0.25, linewidth=0, label="misled")
    axes.plot(iterations, public, "--", color=SAMPLED, linewidth=1.8, label="public test passes")
    axes.plot(iterations, private, color=LINE, linewidth=1.8, label="private verifier passes")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("iteration")
    axes.set_ylabel("share of episodes")
    axes.grid(visible=True, color="#808080", alpha=0.3, linewidth=0.6)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return figure


def _figure(columns: int, rows: int) -> Figure:
    width, height = PANEL
    figure = Figure(figsize=(width * columns, height * rows))
    margins = {"left": 0.76 / width, "right": 0.1 / width, "bottom": 0.45 / height, "top": 0.28 / height}
    figure.subplots_adjust(
        left=margins["left"] / columns, right=1 - margins["right"] / columns, bottom=margins["bottom"] / rows,
        top=1 - margins["top"] / rows, wspace=0.08, hspace=0.3,
    )  # fmt: skip
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure on white, 150 dots per inch."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a label in letters that the font lacks
        FigureCanvasAgg(figure).print_figure(file, format="png", dpi=150, metadata={"Software": SOFTWARE})
    return file.getvalue()


SOFTWARE = "jaxrl_mini report"
"""What our files say that they were made with."""

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def to_svg(figure: Figure, prefix: str, title: str) -> str:
    """The figure as an `<svg>` element for a page whose policy allows no inline styles.

    Styles become attributes, text stays text in the page's font, ink takes the page's color, the background is left
    out, and all ids begin with `prefix`, so that many figures fit in one page.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        FigureCanvasSVG(figure).print_figure(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    ElementTree.register_namespace("", _SVG)
    text = ElementTree.tostring(root, encoding="unicode")
    referenced = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    for element in root.iter():
        _make_plain(element, prefix, referenced)
    for group in list(root):
        for style in group.findall(f"{{{_SVG}}}style"):
            group.remove(style)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": title, "stroke-linejoin": "round"}
    return ElementTree.tostring(root, encoding="unicode")


def _make_plain(element: ElementTree.Element, prefix: str, referenced: set[str]) -> None:
    for declaration in filter(None, element.attrib.pop("style", "").split("; ")):
        name, value = declaration.split(": ", 1)
        if name != "font-family":
            element.attrib[name] = "currentColor" if value == INK else value
    for name in ("d", "x", "y", "transform"):
        if name in element.attrib:
            element.attrib[name] = re.sub(r"-?\d+\.\d{3,}", _shorter, element.attrib[name])
    if element.tag == f"{{{_SVG}}}text":
        element.attrib["fill"] = "currentColor"
    if element.attrib.get("id") not in referenced:
        element.attrib.pop("id", None)
    else:
        element.attrib["id"] = prefix + element.attrib["id"]
    for name in ("clip-path", f"{{{_XLINK}}}href"):
        if name in element.attrib:
            value = element.attrib.pop(name).replace("#", "#" + prefix)
            element.attrib[name.rpartition("}")[2]] = value
    element.text, element.tail = ((part or "").strip("\n ") or None for part in (element.text, element.tail))


def _shorter(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
