"""What MLX runs on, and the preparation it needs before it is imported.

MLX's Linux CPU wheel carries a reference BLAS. Loading OpenBLAS first, with its symbols global, makes MLX's float32
products use it instead: 3.5 -> 189 GFLOP/s for [200, 576] x [576, 1536] on 2 cores of an Intel Xeon (MLX 0.32.4,
OpenBLAS 0.3.31; `python -m mlxlab doctor` measures the machine it runs on).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

_blas = "MLX's own BLAS"
_handles: list[ctypes.CDLL] = []  # of the BLAS in use
_dependencies: list[ctypes.CDLL] = []


def prepare() -> None:
    """Load a fast BLAS for MLX's CPU backend on Linux; does nothing elsewhere. Call before `mlx.core` is imported.

    `MLXLAB_BLAS` names a library with plain `cblas_sgemm` symbols to use, or is `off`.
    """
    global _blas
    wanted = os.environ.get("MLXLAB_BLAS", "")
    if sys.platform != "linux" or wanted == "off" or _handles or "mlx.core" in sys.modules:
        return
    mlx_cpu = _distribution_file("mlx-cpu", "libblas-")
    if mlx_cpu is None:
        return  # CUDA, or a build with a BLAS of its own
    for path in filter(None, [wanted, _distribution_file("cmeel-openblas", "libopenblas.so"), _system_openblas()]):
        try:
            library = _load(str(path), mlx_cpu.parent)
        except OSError as error:
            if wanted:
                from mlxlab.errors import ConfigError

                raise ConfigError(f"MLXLAB_BLAS={wanted} cannot be loaded ({error}); name a library or use off.")
            continue
        _handles.append(library)
        _blas = f"OpenBLAS ({path})"
        return


def tune() -> None:
    """Give OpenBLAS all cores or half of them, whichever is faster now; takes some hundredths of a second.

    On an idle machine all are. On a busy one the threads wait for one another: with 2 cores and other work, 2 threads
    were 6 to 10 times slower than 1. `OPENBLAS_NUM_THREADS` fixes the number instead.
    """
    if not _handles or "OPENBLAS_NUM_THREADS" in os.environ or not hasattr(_handles[0], "openblas_set_num_threads"):
        return
    cores = len(os.sched_getaffinity(0))
    speed = {}
    for threads in {cores, max(1, cores // 2)}:
        _handles[0].openblas_set_num_threads(threads)
        speed[threads] = _gflops()
    _handles[0].openblas_set_num_threads(max(speed, key=speed.get))


def device() -> str:
    """ "metal", "cuda" or "cpu": where MLX computes by default."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def memory_bytes() -> int:
    """Memory of the device that computes: unified or system memory, or the GPU's own; 0 when it cannot be known."""
    import mlx.core as mx

    info = mx.device_info()
    if "memory_size" in info:
        return int(info["memory_size"])
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def describe() -> str:
    """One line: device, library and, on a CPU, the measured float32 speed."""
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "")).strip()
    if device() != "cpu":
        return f"{device()}: {name}, MLX {metadata.version('mlx')}"
    remedy = "" if _handles or sys.platform != "linux" else "; `pip install cmeel-openblas` makes it many times faster"
    tune()
    return f"cpu: {name}, MLX {metadata.version('mlx')}, {_blas}, {_gflops():.0f} GFLOP/s in float32{remedy}"


def _gflops(size: int = 384) -> float:
    import mlx.core as mx

    x = mx.random.normal((size, size), key=mx.random.key(0))
    mx.eval(x, x @ x)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(x @ x)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e9


def _distribution_file(distribution: str, start: str) -> Path | None:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(f.locate()) for f in files if f.name.startswith(start)]
    return min((f for f in found if f.exists()), key=lambda f: len(f.name), default=None)


def _system_openblas() -> str | None:
    return ctypes.util.find_library("openblas")


def _load(path: str, mlx_libraries: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "libgfortran.so.5" not in str(error):
            raise
        _load_gfortran(mlx_libraries)
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if not hasattr(library, "cblas_sgemm"):
        raise OSError("it has no symbol cblas_sgemm")
    return library


def _load_gfortran(mlx_libraries: Path) -> None:
    """OpenBLAS wants libgfortran.so.5; MLX's wheel has one under a private name. Load a copy under the plain name.

    The loader matches libraries by the name stored inside them (SONAME), so that one string is shortened in the copy.
    """
    source = next(mlx_libraries.glob("libgfortran-*.so*"))
    for dependency in mlx_libraries.glob("libquadmath-*.so*"):
        _dependencies.append(ctypes.CDLL(str(dependency), mode=ctypes.RTLD_GLOBAL))
    old, new = source.name.encode() + b"\0", b"libgfortran.so.5\0"
    content = source.read_bytes().replace(old, new.ljust(len(old), b"\0"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "libgfortran.so.5")
        copy.write_bytes(content)
        _dependencies.append(ctypes.CDLL(str(copy), mode=ctypes.RTLD_GLOBAL))  # mapped: the file may go
