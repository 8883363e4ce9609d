"""Says what a task is, exactly, and what is odd about it: ``python -m jaxrl_mini.check_task repair:lines=3``."""

import json
from typing import TYPE_CHECKING, Any

from jaxrl_mini.machine import commandline

if TYPE_CHECKING:
    from jaxrl_mini.tasks.compiled import CompiledTask

EXAMPLES = """\
examples:
  python -m jaxrl_mini.check_task repair:lines=3,steps=7,hidden=true
  python -m jaxrl_mini.check_task my_task.py:MyTask

On stdout, one JSON object: `states` (step and state, where an action is taken), `contexts` (step and view, what a table
policy tells apart), `histories` (what a language model tells apart), `episodes` (complete ones, with every draw of
chance, over all instances; null above 9007199254740991), `success` and `mean_actions` by split, of uniform play and at
best (with memory of all that was seen, in the fewest actions), and `odd`, in words.
"""

MAX_COUNT = 2**53 - 1
"""What every reader of JSON holds exactly."""


def main(arguments: list[str]) -> None:
    """Parses, compiles, says."""
    parser = commandline.Parser("check_task", description="Says what a task is, exactly.", epilog=EXAMPLES)
    parser.add_argument("task", metavar="TASK", help="NAME, FILE.py:CLASS or module:CLASS, with parameters behind it")
    flags = parser.parse_args(arguments)
    from jaxrl_mini.tasks.specification import load_task

    print(json.dumps(report(load_task(flags.task))))


def report(task: "CompiledTask") -> dict[str, Any]:
    """What the command prints."""
    from jaxrl_mini.exact import beliefs

    reached = {
        split: {"uniform": beliefs.uniform(task, split), "best": beliefs.best(task, split)} for split in task.splits
    }
    histories, episodes = beliefs.count_histories(task), beliefs.count_episodes(task)
    return {
        "task": task.name,
        "digest": task.digest,
        "actions": list(task.actions),
        "max_steps": task.max_steps,
        "instances": {split: len(members) for split, members in task.splits.items()},
        "states": len(task.steps),
        "contexts": len(task.views),
        "histories": histories if histories <= MAX_COUNT else None,
        "episodes": episodes if episodes <= MAX_COUNT else None,
        "success": {split: {how: one.success for how, one in both.items()} for split, both in reached.items()},
        "mean_actions": {
            split: {how: one.mean_actions for how, one in both.items()} for split, both in reached.items()
        },
        "odd": odd(task),
    }


def odd(task: "CompiledTask") -> list[str]:
    """What may be a mistake, in words."""
    from jaxrl_mini.tasks.compiled import ENDED

    found = []
    for action, idle in zip(task.actions, task.idle, strict=True):
        if idle:
            found.append(f"action {action!r} never changes anything")
    if not task.accepted.size:
        found.append("nothing is ever submitted, so no episode succeeds")
    elif not task.accepted.any():
        found.append("the verifier accepts nothing")
    elif (task.accepted == 1).all() and (task.submission[task.next_node == ENDED] != ENDED).all():
        found.append("the verifier accepts everything that can be submitted, and every episode submits")
    else:
        hopeless = (task.accepted.max(axis=0) == 0).nonzero()[0]
        found += [f"the verifier accepts nothing for instance {task.instances[instance]}" for instance in hopeless]
    if len(task.instances) > 1:
        for what, seen in (("observation", task.start_text), ("view", task.contexts[task.start_node])):
            pairs = {(instance, one) for instance, one in zip(task.start_instance.tolist(), seen.tolist(), strict=True)}
            if len({one for _, one in pairs}) == len(pairs):
                found.append(f"the first {what} gives the instance away")
    return found


if __name__ == "__main__":
    commandline.run_command(main)
