"""The environments of Gymnasium as tasks: their exact figures are those of Gymnasium's own tables."""

import numpy as np
import pytest

from jaxrl_mini.exact import beliefs
from jaxrl_mini.tasks.specification import load_task

pytestmark = pytest.mark.full
STEPS = 20


def by_reward(policy) -> float:
    """The chance that FrozenLake pays its reward of 1 within so many steps, from its table; by backward induction."""
    gymnasium = pytest.importorskip("gymnasium")
    lake = gymnasium.make("FrozenLake-v1").unwrapped
    value = np.zeros(len(lake.P))
    for _ in range(STEPS):
        value = np.array(
            [
                policy([sum(p * (r + (not end) * value[s]) for p, s, r, end in outcomes) for outcomes in row.values()])
                for row in lake.P.values()
            ]
        )
    return lake.initial_state_distrib @ value


def test_success_is_the_expected_reward_of_the_lake():
    task = load_task(f"gymnasium:FrozenLake-v1,steps={STEPS}")
    assert beliefs.uniform(task, "train").success == pytest.approx(by_reward(np.mean), rel=1e-12)
    assert beliefs.best(task, "train").success == pytest.approx(by_reward(max), rel=1e-9)


@pytest.mark.parametrize(
    ("specification", "actions"),
    [
        ("FrozenLake-v1,steps=8,is_slippery=false", 6),  # three to the right, three down
        ("CliffWalking-v1,steps=14", 13),  # up, eleven to the right, down
    ],
)
def test_the_shortest_way_is_found(specification, actions):
    pytest.importorskip("gymnasium")
    assert beliefs.best(load_task(f"gymnasium:{specification}"), "train") == pytest.approx((1.0, actions))
