"""Built-in methods, registered through the same hook as those of plugins."""

from __future__ import annotations

from mlxlab.hookspecs import hookimpl


@hookimpl
def mlxlab_register_methods(register):
    from mlxlab.methods.dpo import Dpo
    from mlxlab.methods.orpo import Orpo
    from mlxlab.methods.sft import Sft

    register("sft", Sft)
    register("dpo", Dpo)
    register("orpo", Orpo)
