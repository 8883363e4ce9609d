"""A task with chance, two instances that are not seen, and a check that errs."""

import jaxrl_mini


class Doors(jaxrl_mini.Task):
    actions = ("listen", "left", "right")
    max_steps = 2
    header = "Open the door with the prize."
    splits = {"train": ("left", "right"), "held-out": ("left",)}  # noqa: RUF012

    def reset(self, instance):
        self.place, self.heard, self.submission, self.ended, self.steps = instance, "", None, False, 0
        return "two doors"

    def step(self, action):
        self.steps += 1
        if action == "listen":
            self.heard = self.place if self.chance([9, 1]) == 0 else {"left": "right", "right": "left"}[self.place]
        else:
            self.submission = action
        self.ended = action != "listen" or self.steps == 2
        return f"you heard {self.heard}"

    state = property(lambda self: (self.place, self.heard, self.submission, self.steps))
    view = property(lambda self: self.heard)

    @staticmethod
    def verify(submission, instance):
        return 0.75 * (submission == instance)
