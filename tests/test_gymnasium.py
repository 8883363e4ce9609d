"""Our tasks as environments of Gymnasium, and Gymnasium's as tasks: what is sampled there is what is exact here."""

from pathlib import Path

import numpy as np
import pytest

import jaxrl_mini
from jaxrl_mini.config import UserError
from jaxrl_mini.exact import beliefs, situations
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.specification import load_task

pytestmark = pytest.mark.full
DOORS = f"{Path(__file__).parent / 'doors.py'}:Doors"
TASKS = ["binary-search-repair", "repair:lines=2,steps=4,hidden=true", "bandit:success=0.2/0.5/0.8", DOORS]


@pytest.fixture(scope="module", autouse=True)
def gymnasium():
    return pytest.importorskip("gymnasium")


@pytest.mark.parametrize("observations", ["context", "text"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.filterwarnings("ignore:.*WARN")
def test_any_task_is_an_environment_as_gymnasium_checks_it(task, observations):
    from gymnasium.utils.env_checker import check_env

    check_env(jaxrl_mini.TaskEnv(task, observations=observations), skip_render_check=True)


def episode(env, choose):
    """Length and reward of an episode; `choose` gives an action for an observation."""
    (seen, _), steps, ended = env.reset(), 0, False
    while not ended:
        seen, reward, ended, cut, _ = env.step(choose(seen))
        steps += 1
        assert not cut and (ended or reward == 0)
    return steps, reward


@pytest.mark.parametrize(("task", "split"), [(TASKS[0], "train"), (DOORS, "train"), (DOORS, "held-out")])
def test_a_policy_fares_there_as_the_exact_figures_say(task, split):
    tables, rng = load_task(task), np.random.default_rng(5)
    logits = rng.normal(size=tables.shape).astype(np.float32)
    exact = situations.exact_of_logits(tables, logits, split)
    bounds = np.cumsum(np.exp(log_probs_of_logits(logits)), axis=1)[:, :-1]
    env = jaxrl_mini.TaskEnv(task, split)
    env.reset(seed=1)
    played = np.array([episode(env, lambda seen: (rng.random() >= bounds[seen]).sum()) for _ in range(4000)])
    errors = 4 * played.std(axis=0) / len(played) ** 0.5
    assert (np.abs(played.mean(axis=0) - (exact.mean_actions, exact.success_rate)) < errors).all()


def test_a_seed_gives_the_same_episode_again_and_another_another():
    env, episodes = jaxrl_mini.TaskEnv(DOORS, observations="text"), []
    for seed in (3, 3, *range(20)):
        seen = [env.reset(seed=seed)[0], *(env.step(0)[0] for _ in range(2))]
        episodes.append(tuple(seen))
    assert episodes[0] == episodes[1] and len({*episodes}) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("chess",), "'chess' is unknown"), ((DOORS, "test"), "expected one of train, held-out"),
     ((DOORS, "train", "pixels"), "expected one of context, text")],
)  # fmt: skip
def test_what_is_no_environment_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        jaxrl_mini.TaskEnv(*arguments)


@pytest.fixture(scope="module")
def lake():
    """A policy of the slippery lake, kept, and its record's exact success."""
    task = "gymnasium:FrozenLake-v1,steps=100"
    result = jaxrl_mini.run(jaxrl_mini.Config(task=task, iterations=60, lr=0.3, groups=16, eval_episodes=1))
    return load_task(task), result.logits[-1], result.after.exact_success_rate


def test_the_best_success_on_the_lake_is_that_of_value_iteration_on_gymnasiums_own_table(lake, gymnasium):
    table = gymnasium.make("FrozenLake-v1").unwrapped
    value = np.zeros(len(table.P))
    for _ in range(100):
        value = np.array(
            [max(sum(p * (r + (not end) * value[s]) for p, s, r, end in ways) for ways in row.values())
             for row in table.P.values()]
        )  # fmt: skip
    assert beliefs.best(lake[0], "train").success == pytest.approx(table.initial_state_distrib @ value, abs=1e-9)


def test_a_policy_trained_here_fares_in_gymnasium_itself_as_its_record_says(lake, gymnasium):
    task, logits, exact = lake
    bounds = np.cumsum(np.exp(log_probs_of_logits(logits)), axis=1)[:, :-1]
    contexts = {(context // task.width, view): context for context, view in task.views.items()}
    env, rng, won = gymnasium.make("FrozenLake-v1", max_episode_steps=100), np.random.default_rng(2), 0
    env.reset(seed=9)
    for _ in range(20_000):
        seen, _ = env.reset()
        for step in range(100):
            action = int((rng.random() >= bounds[contexts[step, int(seen)]]).sum())
            seen, reward, ended, cut, _ = env.step(action)
            if ended or cut:
                break
        won += int(reward)
    assert abs(won / 20_000 - exact) < 4 * (exact * (1 - exact) / 20_000) ** 0.5 and exact > 0.03
