"""Small random tasks: random transitions, endings, chance, hidden instances, verifiers with probabilities."""

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
