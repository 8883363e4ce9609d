"""The second witness of everything exact about a task: a plain recursive walk over the Python class.

Nothing here knows tables, states or beliefs: it plays copies of the task, action by action and draw by draw.
"""

import copy
import itertools
import math
from collections import defaultdict

from jaxrl_mini.tasks import task as definition


def alternatives(task, method, argument):
    """(probability, the task afterwards, the observation) of every way in which chance can go."""
    scripts = [[]]
    while scripts:
        script, after, weighed = scripts.pop(), copy.deepcopy(task), []

        def draw(weights, script=script, weighed=weighed):
            weighed.append([weight / sum(weights) for weight in weights])
            return script[len(weighed) - 1] if len(weighed) <= len(script) else 0

        definition.alternative = draw
        try:
            text = getattr(after, method)(argument)
        finally:
            definition.alternative = None
        if len(weighed) > len(script):  # the first new draw: each of its alternatives is a script of its own
            scripts += [[*script, i] for i in range(len(weighed[len(script)]))]
            continue
        chance = 1.0
        for taken, weights in zip(script, weighed, strict=True):
            chance *= weights[taken]
        if chance > 0:
            yield chance, after, text


def success_and_actions(make, instance, policy):
    """Of a policy (view, step) -> probabilities of the actions, by walking through every episode."""

    def walk(task, step):
        success, actions = 0.0, 1.0
        for action, probability in zip(task.actions, policy(task.view, step), strict=True):
            for chance, after, _ in alternatives(task, "step", action):
                if after.ended:
                    accepted = 0.0 if after.submission is None else task.verify(after.submission, instance)
                    success += probability * chance * accepted
                else:
                    more = walk(after, step + 1)
                    success, actions = (
                        success + probability * chance * more[0],
                        actions + probability * chance * more[1],
                    )
        return success, actions

    walked = [(chance, walk(task, 0)) for chance, task, _ in alternatives(make(), "reset", instance)]
    return tuple(sum(chance * one[i] for chance, one in walked) for i in range(2))


def success_and_actions_of_texts(make, instance, policy):
    """The same of a policy that remembers what it saw and did: (observation, (action, observation), ...)."""

    def walk(task, texts):
        success, actions = 0.0, 1.0
        for number, (action, probability) in enumerate(zip(task.actions, policy(texts), strict=True)):
            for chance, after, text in alternatives(task, "step", action):
                if after.ended:
                    accepted = 0.0 if after.submission is None else task.verify(after.submission, instance)
                    success += probability * chance * accepted
                else:
                    more = walk(after, (*texts, (number, text)))
                    success += probability * chance * more[0]
                    actions += probability * chance * more[1]
        return success, actions

    walked = [(chance, walk(task, (text,))) for chance, task, text in alternatives(make(), "reset", instance)]
    return tuple(sum(chance * one[i] for chance, one in walked) for i in range(2))


def uniform(view, step, actions):
    return [1 / actions] * actions


def best_success(make, instances):
    """The highest success of a policy with memory, by trying every action after every history."""

    def value(pairs):  # [(probability, task, instance)] that look the same
        best = 0.0
        for action in pairs[0][1].actions:
            success, seen = 0.0, defaultdict(list)
            for probability, task, instance in pairs:
                for chance, after, text in alternatives(task, "step", action):
                    if not after.ended:
                        seen[text].append((probability * chance, after, instance))
                    elif after.submission is not None:
                        success += probability * chance * task.verify(after.submission, instance)
            best = max(best, success + sum(map(value, seen.values())))
        return best

    first = defaultdict(list)
    for instance in instances:
        for chance, task, text in alternatives(make(), "reset", instance):
            first[text].append((chance / len(instances), task, instance))
    return sum(map(value, first.values()))


def histories(make, instances):
    """Every sequence of observations and actions after which an episode of some instance is open."""
    found = set()

    def walk(task, history):
        found.add(history)
        for action in task.actions:
            for _, after, text in alternatives(task, "step", action):
                if not after.ended:
                    walk(after, (*history, action, text))

    for instance in instances:
        for _, task, text in alternatives(make(), "reset", instance):
            walk(task, (text,))
    return found


def count_episodes(make, instances):
    def walk(task):
        every = itertools.chain(*(alternatives(task, "step", action) for action in task.actions))
        return sum(1 if after.ended else walk(after) for _, after, _ in every)

    return sum(walk(task) for instance in instances for _, task, _ in alternatives(make(), "reset", instance))


def episodes(make, task, instance):
    """(chance, choices as pairs of context and action, acceptance) of every way an episode can go, by a walk."""
    places = {(context // task.width, view): context for context, view in task.views.items()}

    def go_on(chance, played, step, taken):
        context = places[step, played.view]
        for number, action in enumerate(played.actions):
            for share, after, _ in alternatives(played, "step", action):
                so_far = (*taken, (context, number))
                if after.ended:
                    accepted = 0.0 if after.submission is None else make().verify(after.submission, instance)
                    yield chance * share, so_far, accepted
                else:
                    yield from go_on(chance * share, after, step + 1, so_far)

    for chance, played, _ in alternatives(make(), "reset", instance):
        yield from go_on(chance, played, 0, ())


def merged(make, task, instance, log_probs):
    """(probability, choices, reward) of all that a policy can do and be rewarded with, each once."""
    found = {}
    for chance, choices, accepted in episodes(make, task, instance):
        chance *= math.exp(sum(log_probs[choice] for choice in choices))
        for reward, share in ((1, accepted), (0, 1 - accepted)):
            found[choices, reward] = found.get((choices, reward), 0.0) + chance * share
    return [(chance, *key) for key, chance in found.items() if chance > 0]
