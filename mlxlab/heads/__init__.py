"""Built-in heads, registered through the same hook as those of plugins."""

from __future__ import annotations

from mlxlab.hookspecs import hookimpl


@hookimpl
def mlxlab_register_heads(register):
    from mlxlab.heads.chunked import Chunked
    from mlxlab.heads.flash import Flash
    from mlxlab.heads.fused import Fused
    from mlxlab.heads.naive import Naive

    register("naive", Naive)
    register("chunked", Chunked)
    register("fused", Fused)
    register("flash", Flash)
