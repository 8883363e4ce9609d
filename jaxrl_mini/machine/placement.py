"""Where a language model's arrays lie when there are several devices.

A mesh has up to two axes. Over `data`, rows (episodes, histories) are split: each device computes some of them, and
their gradients are summed. Over `model`, weight matrices and their Adam moments are split: of what widens by its
outputs, of what narrows by its inputs, so that a pair of layers meets once; embeddings by the vocabulary. Everything
else is whole on every device, and the compiler finds the communication. Results differ from those of one device by
rounding only.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from jaxrl_mini.config import UserError
from jaxrl_mini.machine import hardware

AXES = ("data", "model")
SPLIT = {"c_attn": -1, "c_fc": -1, "c_proj": -2, "wte": -2, "lm_head": -1}
"""The axis of a module's weight matrix that is split over `model`."""
MATRICES = {"kernel", "embedding"}


def make_mesh(text: str) -> Mesh:
    """The mesh that a text such as `data=4,model=2` describes, over the first devices there are.

    Raises:
      UserError: the text is not of that form, or there are not so many devices.
    """
    names, equals, counts = zip(*(part.partition("=") for part in text.split(",")), strict=True)
    whole = all(count.isascii() and count.isdigit() and int(count) > 0 for count in counts)
    if not (whole and all(equals) and set(names) <= set(AXES) and len(set(names)) == len(names)):
        raise UserError(f"--mesh {text!r} is no mesh: expected data=N, model=N, or data=N,model=M")
    shape = dict.fromkeys(AXES, 1) | dict(zip(names, map(int, counts), strict=True))
    devices, needed = hardware.devices(), int(np.prod([*shape.values()]))
    if needed > len(devices) or (jax.process_count() > 1 and needed < len(devices)):
        raise UserError(f"--mesh {text} takes {needed} devices: there are {len(devices)}")
    return Mesh(
        np.array(devices[:needed]).reshape(*shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


@dataclass(frozen=True)
class Placement:
    """Puts arrays where they belong on a mesh with the axes `AXES`; without one, leaves everything as it is."""

    mesh: Mesh | None = None

    @property
    def data(self) -> int:
        """Over how many devices rows are split."""
        return 1 if self.mesh is None else self.mesh.shape["data"]

    def rows(self, array: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Splits an axis over `data`, inside a jitted program; left to the compiler if it does not divide evenly."""
        if self.mesh is None or array.shape[axis] % self.data:
            return array
        spec = PartitionSpec(*[None] * axis, "data")
        return lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def whole(self, tree: PyTree) -> PyTree:
        """Puts arrays on every device, inside a jitted program, so that every process can read them."""
        if self.mesh is None:
            return tree
        return lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

    def weights(self, tree: PyTree) -> PyTree:
        """Splits weights, or what has their names and shapes, over `model`, inside a jitted program."""
        return tree if self.mesh is None else lax.with_sharding_constraint(tree, self._of_weights(tree))

    def put_weights(self, tree: PyTree) -> PyTree:
        """The same outside of one, from arrays that every process has."""
        return tree if self.mesh is None else jax.device_put(jax.tree.map(np.asarray, tree), self._of_weights(tree))

    def _of_weights(self, tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(self._of_weight, tree)

    def _of_weight(self, path: tuple[Any, ...], weight: Array) -> NamedSharding:
        assert self.mesh is not None
        names = {str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path}
        split = next((SPLIT[name] for name in names & set(SPLIT)), 0)
        if not (split and names & MATRICES) or weight.shape[split] % self.mesh.shape["model"]:
            return NamedSharding(self.mesh, PartitionSpec())
        return NamedSharding(self.mesh, PartitionSpec(*[None] * (weight.ndim + split), "model"))


ONE_DEVICE = Placement()
