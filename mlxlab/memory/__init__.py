"""Built-in memory options, registered through the same hook as those of plugins.

The axis has two slots: `backward` (how gradients are computed) and `layout` (how branches become token streams).
"""

from __future__ import annotations

from mlxlab.hookspecs import hookimpl


@hookimpl
def mlxlab_register_memory(register):
    from mlxlab.memory.backward.checkpoint import Checkpoint
    from mlxlab.memory.backward.plain import Plain
    from mlxlab.memory.backward.segmented import Segmented
    from mlxlab.memory.layouts.packed import Packed
    from mlxlab.memory.layouts.prefix_shared import PrefixShared
    from mlxlab.memory.layouts.separate import Separate

    register("plain", Plain)
    register("checkpoint", Checkpoint)
    register("segmented", Segmented)
    register("separate", Separate)
    register("prefix_shared", PrefixShared)
    register("packed", Packed)
