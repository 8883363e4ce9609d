"""Learning curves: the numbers that are drawn, and how the drawing fits into a page."""

import copy
import json
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from jaxrl_mini.config import UserError
from jaxrl_mini.pages import figures
from jaxrl_mini.pages.figures import METRICS, SUCCESS
from jaxrl_mini.runs import records
from jaxrl_mini.sweeps import table_part
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid

SIZES = {"iterations": 5, "groups": 2, "group_size": 4, "eval_episodes": 8}


@pytest.fixture(scope="module")
def record(grpo_run):
    return json.loads(json.dumps(records.build(grpo_run)))


@pytest.fixture(scope="module")
def curves(record):
    return figures.curves_of_record(record, "run $x_1$.json")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A folder of two settings with eight seeds; of the first run, the numbers are lost after the third iteration."""
    grid = Grid.product(range(8), lr=[0.08, 0.3], history_every=2, **SIZES)
    dataset = Dataset.create(tmp_path_factory.mktemp("sweep") / "s", grid, {})
    for part in range(grid.parts):
        runs, history = (dict(columns) for columns in table_part.train_part(grid, part))
        lost = (history["run"] == 0) & (history["iteration"] > 2)
        for name in (SUCCESS, "loss"):
            history[name] = np.where(lost, np.nan, history[name])
        runs["finite"] = np.where(runs["run"] == 0, False, runs["finite"])
        dataset.commit(part, runs, history)
    return dataset


def test_exact_success_is_that_of_the_policy_after_so_many_iterations(record, curves):
    line = curves.lines[SUCCESS]
    assert line.iterations.tolist() == list(range(101))
    expected = [record["before"][SUCCESS], *(row[SUCCESS] for row in record["history"])]
    assert line.values.tolist() == [expected] and line.values[0, -1] == record["after"][SUCCESS]


def test_the_other_metrics_stand_at_their_iterations(record, curves):
    for name in set(METRICS) - {SUCCESS}:
        assert curves.lines[name].iterations.tolist() == list(range(100))
        assert curves.lines[name].values.tolist() == [[row[name] for row in record["history"]]]


def test_sampled_success_has_wilson_intervals(record, curves):
    batches, ends = curves.batches, curves.evaluations
    for i in (0, 7, 99):
        rate = record["history"][i]["train_success_rate"]
        expected = stats.binomtest(round(32 * rate), 32).proportion_ci(method="wilson")
        assert (batches.iterations[i], batches.rates[i]) == (i, rate)
        assert (batches.low[i], batches.high[i]) == pytest.approx(tuple(expected), abs=1e-12)
    assert ends.iterations.tolist() == [0, 100]
    for i, when in enumerate(("before", "after")):
        assert (ends.low[i], ends.high[i]) == tuple(record[when]["success_rate_interval"])


def test_a_language_models_success_is_drawn_where_it_was_computed(record):
    sparse = copy.deepcopy(record)
    for row in sparse["history"]:
        row[SUCCESS] = row[SUCCESS] if row["iteration"] % 10 == 9 else None
    line = figures.curves_of_record(sparse, "lm").lines[SUCCESS]
    assert line.iterations.tolist() == list(range(0, 101, 10))
    assert line.values[0].tolist() == [record["before"][SUCCESS], *(r[SUCCESS] for r in record["history"][9::10])]


def test_a_long_history_is_thinned(record):
    long = copy.deepcopy(record)
    long["config"]["iterations"] = 5000
    long["history"] = [{**long["history"][0], "iteration": i, "loss": i / 7} for i in range(5000)]
    line = figures.curves_of_record(long, "long").lines["loss"]
    assert len(line.iterations) == figures.MOST_POINTS and line.iterations[-1] == 4999
    np.testing.assert_array_equal(line.values[0], line.iterations / 7)


@pytest.mark.parametrize("value", ["1", True, [1], 10**400, {}])
def test_a_figure_that_is_no_number_is_named(record, value):
    odd = copy.deepcopy(record)
    odd["history"][3]["entropy"] = value
    with pytest.raises(UserError, match="entropy"):
        figures.curves_of_record(odd, "odd")


@pytest.mark.parametrize(("name", "value"), [("train_success_rate", 1.5), ("train_success_rate", None)])
def test_a_success_rate_that_is_none_is_refused(record, name, value):
    odd = copy.deepcopy(record)
    odd["history"][3][name] = value
    with pytest.raises(UserError, match="success"):
        figures.curves_of_record(odd, "odd")


def test_a_sweeps_curves_are_the_quantiles_of_its_runs(sweep):
    found = figures.curves_of_sweep(sweep, ["a", "b"])
    assert [(one.label, one.runs) for one in found] == [("a", 8), ("b", 8)]
    table = pd.read_parquet(sweep.path / "history")
    table[SUCCESS] = table[SUCCESS].fillna(0.0)  # a run that failed succeeds never
    for setting, curves in enumerate(found):
        for name in METRICS:
            by_iteration = table[table.setting == setting].groupby("iteration")[name]
            expected = np.array([by_iteration.quantile(level) for level in (0.025, 0.25, 0.5, 0.75, 0.975)])
            line = curves.lines[name]
            shift = int(name == SUCCESS)
            assert line.iterations[shift:].tolist() == [i + shift for i in (1, 3, 4)], name
            np.testing.assert_allclose(line.values[:, shift:], expected, atol=1e-12)
        np.testing.assert_allclose(curves.lines[SUCCESS].values[:, 0], 0.06526491769547325, atol=1e-12)


def test_a_failed_run_ends_at_success_0(sweep):
    final = figures.curves_of_sweep(sweep, ["a", "b"])[0].final
    assert final[0] == 0 and (final[1:] > 0).all() and len(final) == 8


def test_success_that_was_not_evaluated_is_not_drawn(golden):
    """Of two language models, evaluated after two and three of three iterations."""
    (found,) = figures.curves_of_sweep(Dataset.open(golden / "sweep-version-1/language"), ["a"])
    line = found.lines[SUCCESS]
    table = pd.read_parquet(golden / "sweep-version-1/language/history")
    expected = [table[table.iteration == i][SUCCESS].median() for i in (1, 2)]
    assert line.iterations.tolist() == [0, 2, 3] and line.values[2, 1:] == pytest.approx(expected)
    assert found.lines["loss"].iterations.tolist() == [0, 1, 2]


def test_without_history_there_are_no_lines(tmp_path):
    grid = Grid.product(range(2), history_every=0, **SIZES)
    dataset = Dataset.create(tmp_path / "s", grid, {})
    dataset.commit(0, *table_part.train_part(grid, 0))
    (found,) = figures.curves_of_sweep(dataset, ["a"])
    assert found.lines == {} and len(found.final) == 2


# Drawing


def test_what_is_drawn_is_the_data(curves, sweep):
    fleet_curves = figures.curves_of_sweep(sweep, ["a", "b"])[0]
    single, median = figures.panels([curves, fleet_curves], SUCCESS)
    np.testing.assert_array_equal(single.axes[0].lines[-1].get_ydata(), curves.lines[SUCCESS].values[0])
    np.testing.assert_array_equal(median.axes[0].lines[-1].get_ydata(), fleet_curves.lines[SUCCESS].values[2])
    outer = median.axes[0].collections[0].get_paths()[0].vertices
    assert outer[:, 1].min() == fleet_curves.lines[SUCCESS].values[0].min()
    assert outer[:, 1].max() == fleet_curves.lines[SUCCESS].values[4].max()


@pytest.mark.parametrize("metric", sorted(set(METRICS) - {"loss"}))
def test_panels_have_common_axes(curves, sweep, metric):
    drawn = figures.panels([curves, *figures.curves_of_sweep(sweep, ["a", "b"])], metric)
    assert len({(figure.axes[0].get_xlim(), figure.axes[0].get_ylim()) for figure in drawn}) == 1


def test_a_picture_says_what_made_it(curves, sweep):
    every = [curves, *figures.curves_of_sweep(sweep, ["a", "\u6570"])] * 2  # a letter that the font may lack
    png = figures.to_png(figures.side_by_side(every, "loss"))
    assert png.startswith(b"\x89PNG") and figures.SOFTWARE.encode() in png[:2000]


def test_an_svg_needs_no_styles_and_shares_a_page(curves):
    texts = [figures.to_svg(figures.panels([curves], SUCCESS)[0], prefix, 'a "<b>') for prefix in ("x-", "y-")]
    ids = []
    for prefix, text in zip(("x-", "y-"), texts, strict=True):
        root = ElementTree.fromstring(text)
        elements = list(root.iter())
        assert root.get("aria-label") == 'a "<b>' and root.get("role") == "img" and root.get("viewBox")
        assert not any("style" in element.attrib or element.tag.endswith(("style", "script")) for element in elements)
        mine = {element.get("id") for element in elements} - {None}
        used = set(re.findall(rf"#({prefix}[^)\"]+)", text))
        assert mine == used and mine
        ids.append(mine)
        words = {element.text for element in elements if element.tag.endswith("}text")}
        assert {"iteration", "success", "exact", "0.2"} <= words
        assert "#000000" not in text and "currentColor" in text
    assert not ids[0] & ids[1]
    assert len(texts[0]) < 40_000


def test_an_svg_keeps_the_digits_of_its_labels(curves):
    figure = figures.panels([curves], "loss")[0]
    figure.axes[0].set_yticks([0.0125, 0.01375])
    text = figures.to_svg(figure, "x-", "loss")
    assert ">0.01250<" in text and ">0.01375<" in text
    assert not re.search(r'd="[^"]*\.\d{3}', text)


def test_panels_that_no_run_needs_are_left_out(curves):
    figure = figures.side_by_side([curves] * 5, "entropy")
    assert [axes.axison for axes in figure.axes] == [True] * 5 + [False]
