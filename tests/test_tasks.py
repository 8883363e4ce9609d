"""What is said of a task by enumeration and dynamic programming is what a plain walk over its Python class finds."""

import functools

import pytest
import walk
from generated import Generated, given_any
from hypothesis import settings

from jaxrl_mini.exact import beliefs
from jaxrl_mini.tasks.compiled import compile_task
from jaxrl_mini.tasks.specification import load_task, make_task

COME_ALONG = [
    "binary-search-repair",
    "repair:lines=1,steps=4",
    "repair:lines=2,steps=4,hidden=true",
    "bandit:success=0.2/0.5/0.8",
    "deep-sea:size=5",
    "guess:numbers=4",
    "guess:numbers=3,price=0,steps=3",
]


def check(make, compiled):
    """Every exact figure of a task against the walk."""
    task = make()
    instances = list(dict.fromkeys(one for members in task.splits.values() for one in members))
    play = functools.partial(walk.uniform, actions=len(task.actions))
    for split, members in task.splits.items():
        walked = [walk.success_and_actions(make, instance, play) for instance in members]
        success, actions = (sum(one[i] for one in walked) / len(members) for i in range(2))
        assert beliefs.uniform(compiled, split) == pytest.approx((success, actions), abs=1e-12)
        assert beliefs.best(compiled, split).success == pytest.approx(walk.best_success(make, members), abs=1e-9)
    assert beliefs.count_histories(compiled) == len(walk.histories(make, instances))
    assert beliefs.count_episodes(compiled) == walk.count_episodes(make, instances)


@pytest.mark.parametrize("specification", [one for one in COME_ALONG if one != "binary-search-repair"])
def test_the_tasks_that_come_along_are_what_a_walk_finds(specification):
    check(lambda: make_task(specification), load_task(specification))


@settings(max_examples=25, deadline=None)
@given_any
def test_any_small_task_is_what_a_walk_finds(**parameters):
    check(lambda: Generated(**parameters), compile_task(Generated(**parameters), "generated"))


def test_the_articles_task_has_its_numbers():
    compiled = load_task("binary-search-repair")
    assert beliefs.uniform(compiled, "train") == pytest.approx((0.06526491769547325, 3.9906121399176955), abs=1e-14)
    assert beliefs.best(compiled, "train") == (1.0, 3.0)
    assert beliefs.count_histories(compiled) == 3906 and beliefs.count_episodes(compiled) == 19531
    assert compiled.width == 4 and compiled.contexts.max() < 24


def test_closed_forms():
    assert beliefs.uniform(load_task("deep-sea:size=40"), "train").success == pytest.approx(2.0**-40, rel=1e-12)
    assert beliefs.best(load_task("bandit:success=0.1/0.7/0.3"), "train") == (0.7, 1.0)
    # Four numbers: two questions find each, at the price of two; saying one at once is right in a quarter of the cases.
    assert beliefs.best(load_task("guess:numbers=4,price=0.05"), "train") == pytest.approx((0.95**2, 3.0))
    assert beliefs.best(load_task("guess:numbers=4,price=0.9"), "train") == pytest.approx((0.25, 1.0))
    hidden = beliefs.best(load_task("repair:lines=3,steps=7,hidden=true"), "train")
    seen = beliefs.best(load_task("repair:lines=3,steps=7"), "train")
    assert hidden == pytest.approx((1.0, 1 + seen.mean_actions))  # looking costs a step


def test_a_digest_is_that_of_what_the_task_does():
    assert load_task("repair:lines=2,steps=4").digest == compile_task(make_task("repair:lines=2,steps=4"), "x").digest
    others = ["repair:lines=2,steps=5", "guess:numbers=4,price=0.1", *COME_ALONG]
    assert len({load_task(one).digest for one in others}) == len(others)
    assert load_task("guess:numbers=4").digest == load_task("guess:4").digest


def test_tables_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        load_task("deep-sea:size=5").accepted[0] = 1
