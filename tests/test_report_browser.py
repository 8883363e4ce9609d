"""The report in the system's Chromium: it asks for nothing, shows the stored policy, obeys keys, is accessible."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxrl_mini.exact import flow
from jaxrl_mini.machine import files
from jaxrl_mini.pages import page, sources
from jaxrl_mini.runs import recording, records
from jaxrl_mini.tasks.repair import ACTIONS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")]

AXE = """() => axe.run(document, {resultTypes: ["violations"]}).then((found) =>
  found.violations.map((one) => [one.id, one.nodes.map((node) => node.html)]))"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def folder(grpo_run, tmp_path_factory):
    """A report of a run with its recording, and one that says hostile things."""
    path = tmp_path_factory.mktemp("report")
    record = json.loads(json.dumps(records.build(grpo_run)))
    with files.Output(path / "run.npz") as output:
        recording.write(grpo_run, output)
    odd = copy.deepcopy(record)
    odd["runtime"]["platform"] = odd["runtime"]["</dd><script>"] = (
        "<script>window.hostile = 1</script><img src='//x/y'>"
    )
    for name, content in (("run", record), ("<img src=x onerror=window.hostile=1>", odd)):
        (path / f"{name}.json").write_text(json.dumps(content))
        found = sources.read([str(path / f"{name}.json"), str(path / "run.npz")])
        (path / f"{len(name)}.html").write_text(page.render(found))
    return path


@pytest.fixture
def opened(browser, folder):
    """Opens the report; its `requests` and `messages` are kept, and at the end there are none beside the file."""
    pages = []

    def open_page(name="3.html", **options):
        one = browser.new_page(**({"viewport": {"width": 1280, "height": 900}} | options))
        one.requests, one.messages = [], []
        one.on("request", lambda request: one.requests.append(request.url))
        one.on("console", lambda message: one.messages.append(message.text))
        one.on("pageerror", lambda error: one.messages.append(str(error)))
        one.goto((folder / name).as_uri())
        pages.append(one)
        return one

    yield open_page
    for one in pages:
        assert [Path(url).name for url in one.requests] == [Path(one.url).name]
        one.close()


def shown_policy(one) -> np.ndarray:
    """The numbers in the table's coloured cells, in percent [24, 6]."""
    cells = one.eval_on_selector_all("td[data-kind=cell]", "cells => cells.map((cell) => cell.textContent)")
    return np.array(cells, float).reshape(24, 6)


def stored_policy(grpo_run, iteration: int) -> np.ndarray:
    weights = np.exp(grpo_run.logits[iteration].astype(np.float64))
    return 100 * weights / weights.sum(axis=1, keepdims=True)


def assert_shown(one, grpo_run, iteration: int) -> None:
    assert one.locator("output").text_content() == f"{iteration} of 100"
    assert np.abs(shown_policy(one) - stored_policy(grpo_run, iteration)).max() <= 0.05 + 1e-9


def test_nothing_is_asked_for_and_nothing_complained_about(opened):
    one = opened()
    assert one.messages == [] and one.locator("svg").count() == 9


def test_the_slider_starts_at_the_stored_policy(opened, grpo_run):
    one = opened()
    assert_shown(one, grpo_run, 100)
    assert one.locator("p.now").text_content().startswith(f"Success {100 * grpo_run.after.exact_success_rate:.1f} %")


def test_arrow_keys_move_through_the_iterations(opened, grpo_run):
    one = opened()
    slider = one.get_by_role("slider", name="Iteration")
    slider.focus()
    for key, iteration in (("ArrowLeft", 99), ("ArrowLeft", 98), ("ArrowRight", 99), ("Home", 0), ("ArrowUp", 1)):
        one.keyboard.press(key)
        assert_shown(one, grpo_run, iteration)
    exact = 100 * grpo_run.history["exact_success_rate"][0]
    assert slider.get_attribute("aria-valuetext") == f"after 1 iterations, success {exact:.1f} percent"


def test_tab_reaches_the_button_and_the_slider(opened):
    one = opened()
    reached = []
    for _ in range(20):
        one.keyboard.press("Tab")
        reached.append(one.evaluate("document.activeElement.tagName + ' ' + document.activeElement.textContent.trim()"))
    assert reached[0] == "A Skip to the content" and "BUTTON Play" in reached and "INPUT" in map(str.strip, reached)
    assert reached.index("BUTTON Play") + 1 == [word.strip() for word in reached].index("INPUT")


def test_play_runs_from_the_start_to_the_end_and_can_be_stopped(opened, grpo_run):
    one = opened()
    one.clock.install()
    button = one.get_by_role("button")
    button.focus()
    one.keyboard.press("Space")
    assert button.text_content() == "Pause"
    one.clock.run_for(1300)
    button.click()
    middle = int(one.locator("output").text_content().split()[0])
    assert 0 < middle < 100
    one.clock.run_for(1000)
    assert button.text_content() == "Play"
    assert_shown(one, grpo_run, middle)
    one.keyboard.press("ArrowRight")
    assert_shown(one, grpo_run, middle + 1)
    button.click()
    one.clock.run_for(60_000)
    assert button.text_content() == "Play"
    assert_shown(one, grpo_run, 100)


def test_the_flow_is_drawn_as_it_is(opened, grpo_run):
    one = opened()
    one.get_by_role("slider").fill("40")
    found = flow.flow(stored_policy(grpo_run, 40) / 100)
    boxes = one.eval_on_selector_all(".flow rect + text, .flow rect ~ text:not(.right):not(.wrong)",
                                     "texts => texts.map((text) => text.textContent)")  # fmt: skip
    reached = np.append(found.visits.ravel(), found.moves[5].sum(axis=0))
    assert np.abs(np.array(boxes, float) - 100 * reached).max() <= 0.05 + 1e-9
    widths = one.eval_on_selector_all(".moves path", "paths => paths.map((path) => +path.getAttribute('stroke-width'))")
    expected = np.array([found.moves[move] for move in flow.MOVES])
    assert np.abs(np.array(widths) - np.where(expected > 0.0005, 0.8 + 26 * expected, 0)).max() < 0.014
    path = one.locator(".likeliest").text_content().split(" (")[0]
    assert path == " → ".join(ACTIONS[action] for action in flow.likeliest(stored_policy(grpo_run, 40) / 100).actions)


def test_without_scripts_the_trained_policy_is_there(opened, grpo_run):
    plain, live = opened(java_script_enabled=False), opened()
    assert not plain.locator(".controls").is_visible() and live.locator(".controls").is_visible()
    assert plain.locator(".side").inner_html() == live.locator(".side").inner_html()
    assert plain.locator("p.now").inner_html() == live.locator("p.now").inner_html()


def test_no_script_of_a_file_runs_and_none_can_be_added(opened):
    one = opened("36.html")
    assert one.evaluate("window.hostile") is None and one.locator("img").count() == 0 and one.messages == []
    refused = []
    one.on("requestfailed", lambda request: refused.append(request.failure))
    blocked = one.evaluate("""async () => {
        const found = [];
        document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.hostile = 1";
        const image = document.createElement("img");
        image.src = "http://127.0.0.1:9/x.png";
        const style = document.createElement("style");
        style.textContent = "body { display: none }";
        document.body.append(script, image, style);
        await fetch("http://127.0.0.1:9/").catch(() => 0);
        await new Promise((resolve) => setTimeout(resolve, 50));
        return found.sort();
    }""")
    assert blocked == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert one.evaluate("window.hostile") is None
    assert len(refused) == len(one.requests) - 1 and set(refused) <= {"csp"}
    del one.requests[1:]  # what this test asked for and did not get


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_is_accessible_and_fits(opened, scheme, width):
    import axe_playwright_python

    one = opened(viewport={"width": width, "height": 800}, color_scheme=scheme)
    dark = one.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert dark == (scheme == "dark")
    assert one.evaluate("document.documentElement.scrollWidth") == width
    one.get_by_role("slider").fill("60")
    one.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text())
    assert one.evaluate(AXE) == []
