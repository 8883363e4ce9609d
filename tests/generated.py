"""Small tasks: any random ones, and two by hand."""

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxrl_mini import Task

given_any = given(
    seed=st.integers(0, 10**6), actions=st.integers(2, 3), steps=st.integers(1, 3), places=st.integers(1, 4),
    instances=st.integers(1, 3), hidden=st.booleans(),
)  # fmt: skip
"""Hands a test the parameters of any `Generated`, as keywords."""


class Generated(Task):
    """A task whose rules are drawn from a seed: what a step does is looked up in tables of its own."""

    def __init__(self, seed, actions=3, steps=3, places=4, instances=2, hidden=True):
        draw = random.Random(seed)
        self.actions = tuple(f"act_{i}" for i in range(actions))
        self.max_steps, self.header = steps, "Do something."
        self.splits = {"train": tuple(range(instances)), "held-out": (draw.randrange(instances),)}
        self.hidden = hidden
        keys = [(place, action) for place in range(places) for action in range(actions)]
        self.moves = {
            key: tuple((draw.randrange(places), draw.choice((1.0, 2.0, 0.5))) for _ in range(draw.choice((1, 1, 2, 3))))
            for key in keys
        }
        self.ends = {key: draw.random() < 0.25 for key in keys}
        self.shows = {key: draw.random() < 0.5 for key in keys}
        self.looks = [draw.randrange(2) for _ in range(places)]
        self.starts = [[draw.choice((0.0, 1.0, 3.0)) for _ in range(places - 1)] + [0.1] for _ in range(instances)]
        worth = {(place, i): draw.choice((0.0, 0.3, 1.0)) for place in range(places) for i in range(instances)}
        self.worth = tuple(sorted(worth.items()))

    def reset(self, instance):
        self.place, self.steps, self.ended, self.submission = self.chance(self.starts[instance]), 0, False, None
        return f"{self.looks[self.place]}"

    def step(self, action):
        key = self.place, self.actions.index(action)
        moves = self.moves[key]
        self.place = moves[self.chance([weight for _, weight in moves]) if len(moves) > 1 else 0][0]
        self.steps += 1
        if self.ends[key]:
            self.submission = self.place, self.worth
        self.ended = self.ends[key] or self.steps == self.max_steps
        return f"place {self.place}" if self.shows[key] else f"{self.looks[self.place]}"

    @property
    def state(self):
        return self.place, self.steps

    @property
    def view(self):
        return self.looks[self.place] if self.hidden else self.place

    @staticmethod
    def verify(submission, instance):
        place, worth = submission
        return dict(worth)[place, instance]


class Doors(Task):
    """Stop or go on, twice at most: instances are accepted after either with probabilities of their own."""

    actions, max_steps, header = ("stop", "go"), 2, "Stop somewhere."

    def __init__(self, instances=2, shown=False):
        self.shown = shown
        self.splits = {"train": tuple(range(instances))}

    def reset(self, instance):
        self.instance, self.steps, self.submission = instance, 0, None
        return "go"

    def step(self, action):
        self.steps += 1
        if action == "stop":
            self.submission = self.steps
        return "go"

    ended = property(lambda self: self.submission is not None or self.steps == 2)
    state = property(lambda self: (self.instance, self.steps))
    view = property(lambda self: self.instance if self.shown else 0)

    @staticmethod
    def verify(submission, instance):
        return ((0.9, 0.2), (0.0, 0.6), (0.3, 1.0))[instance][submission - 1]


class Wide(Task):
    """One state, and many ways out of it."""

    header = "Do something."

    def __init__(self, instances: int, actions: int, steps: int):
        self.splits, self.max_steps = {"train": tuple(range(instances))}, steps
        self.actions = tuple(map(str, range(actions)))

    def reset(self, instance):
        self.steps = 0
        return ""

    def step(self, action):
        self.steps += 1
        return ""

    ended = property(lambda self: self.steps == self.max_steps)
    state = property(lambda self: self.steps)
    view = 0

    @staticmethod
    def verify(submission, instance):
        return 0.0
