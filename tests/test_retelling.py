"""What an episode of any task showed, told again: as the Python class shows it, in the record's report too."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxrl_mini import report, train
from jaxrl_mini.tasks.retelling import retold
from jaxrl_mini.tasks.specification import load_task, make_task
from jaxrl_mini.tasks.task import Episode

DOORS = Path(__file__).parent / "doors.py"
SURE = ["repair:lines=2,steps=4", "repair:lines=2,steps=4,hidden=true", "guess:numbers=3", "binary-search-repair"]


@pytest.mark.parametrize("name", SURE)
def test_an_episode_is_told_as_the_class_shows_it(name):
    task, rng = load_task(name), np.random.default_rng(0)
    places = {(context // task.width, view): context for context, view in task.views.items()}
    for number in range(40):
        instances = list(make_task(name).splits["train"])
        place = number % len(instances)
        episode, contexts = Episode(make_task(name), instances[place]), []
        while not episode.task.ended:
            contexts.append(places[len(episode.actions), episode.task.view])
            episode.step(int(rng.integers(len(task.actions))))
        possible = range(len(task.accepted) + 1)
        told = []
        for submission in possible:
            try:
                told.append(retold(task, task.splits["train"][place], contexts, episode.actions, submission))
            except ValueError:
                continue
        assert told == [tuple(episode.observations)]  # of all that could be handed in, one fits


def test_what_chance_hides_is_told_as_the_likeliest():
    task = load_task(f"{DOORS}:Doors")
    places = {(context // task.width, view): context for context, view in task.views.items()}
    for instance in (0, 1):
        contexts = places[0, ""], places[1, "left"]
        submission = int(np.flatnonzero(task.accepted[:, 0])[0]) + 1  # the left door
        assert retold(task, instance, contexts, [0, 1], submission) == ("two doors", "you heard left", "you heard left")


def test_the_report_shows_a_task_of_ones_own(command, tmp_path):
    shutil.copy(DOORS, tmp_path)
    flags = "--task", "doors.py:Doors", "--iterations", 2, "--eval-episodes", 5
    assert command(train, *flags, "--output", "r.json", "--trajectories", "r.npz").code == 0
    refused = command(report, "r.json", "r.npz")
    assert refused.code == 2 and "name it, --task doors.py:Doors" in refused.err[0]
    assert command(report, "r.json", "r.npz", "--task", "doors.py:Doors").code == 0
    page = (tmp_path / "report.html").read_text()
    assert "two doors" in page and "you heard" in page and "before, held-out" in page and "The instance is" in page
    assert "binary search" not in page and "--task doors.py:Doors" in page
    assert command(report, "r.json", "--output", "alone.html").code == 0
