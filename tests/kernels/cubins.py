"""Compare the machine code of two checkouts: `python -m tests.kernels.cubins [CHECKOUT [PATTERN]]`.

Rows measured on a device stand for as long as a kernel's instructions do. Each CUDA source that a family compiles, for
every workload and every test, is built here by nvcc and hashed: code and registers, not names, paths or debug sections.
With a CHECKOUT its hashes are compared with this one's; the status is 1 where a kernel of both differs. PATTERN: a
regular expression of kernels. Hashes are kept in build/cubins by what went into them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]


def sources() -> Iterator[Any]:
    """Every CudaSource of gdn, kv, moe and nvfp4; of the last for all of its workloads."""
    from kernels.nvfp4 import cases, cuda_gemm, cuda_w4a8, line, ring_config

    # In the checkouts that this one is compared with they may have their names of before.
    pdl = "pdl" if "pdl" in inspect.signature(ring_config.choose_ring).parameters else "chained"
    source_of = getattr(cuda_gemm, "_source_of", cuda_gemm.source)
    for name in ("gdn", "kv", "moe", "nvfp4"):
        for path in sorted(Path("kernels", name).rglob("cuda_*.py")):
            module = importlib.import_module(".".join(path.with_suffix("").parts))
            yield from getattr(module, "CUDA_SOURCES", ())
    for workload in cases.WORKLOADS:
        m, n, k, dtype = (workload.axes[axis] for axis in ("M", "N", "K", "dtype"))
        if dtype not in ("bf16", "fp16") or workload.axes.get("weights", "nvfp4") != "nvfp4":
            continue
        shape = (int(m), int(n), int(k), dtype)
        yield cuda_w4a8.quantiser_source(dtype, cuda_w4a8.quantiser_shape(int(k))[0])
        made: tuple[tuple[Any, dict[str, bool], Any], ...] = (
            (ring_config.choose_ring, {pdl: False}, ring_config.source),
            (ring_config.choose_ring, {pdl: True}, ring_config.source),
            (cuda_gemm.choose, {}, source_of),
            (cuda_gemm.choose_config, {}, cuda_gemm.source),
            (cuda_gemm.stream.choose_config, {}, cuda_gemm.stream.source),
            (cuda_gemm.resident.choose_config, {}, cuda_gemm.resident.source),
            (line.choose_config, {}, line.source),
            (cuda_w4a8.choose_config, {"promoted": False}, cuda_w4a8.source),
            (cuda_w4a8.choose_config, {"promoted": True}, cuda_w4a8.source),
        )
        for choose, more, source in made:
            with contextlib.suppress(ValueError):  # a shape that this kernel does not take
                yield source(choose(*shape, **more))


def code(cubin: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Each kernel's name, instructions and registers."""
    start, count, names_at = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<2H", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + 64 * i) for i in range(count)]
    names = sections[names_at][4]
    for name_at, _, _, _, at, size, _, info, _, _ in sections:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        if name.startswith(".text."):
            yield name.removeprefix(".text."), cubin[at : at + size], info >> 24


def code_of(cubin: bytes) -> dict[str, str]:
    """A hash of each kernel's instructions and registers."""
    return {name: hashlib.sha256(its + bytes([used])).hexdigest()[:16] for name, its, used in code(cubin)}


def hashes(pattern: str = "") -> dict[str, str]:
    """Kernel -> hash, of the checkout that `kernels` is imported from."""
    from kernels import cuda

    found: dict[str, str] = {}
    kept = HERE / "build" / "cubins"
    kept.mkdir(parents=True, exist_ok=True)
    done = set()
    for source in sources():
        if not any(re.search(pattern, name) for name in source.kernels):
            continue
        folders = (source.path.parent, cuda.HEADERS, cuda.HEADERS / "sm90")
        texts = [path.read_text() for path in (source.path, *(x for f in folders for x in sorted(f.glob("*.cuh"))))]
        key = hashlib.sha256("\0".join((*source.options, *texts)).encode()).hexdigest()[:32]
        if key in done:
            continue
        done.add(key)
        path = kept / f"{source.path.stem}-{key}.json"
        if not path.exists():
            command = ["nvcc", "-cubin", *cuda.nvcc_architecture(cuda.architecture(source, (9, 0))), *source.options]
            command += [*(f"-I{folder}" for folder in cuda.include_folders(source)), str(source.path)]
            with tempfile.TemporaryDirectory() as scratch:
                subprocess.run([*command, "-o", f"{scratch}/kernel.cubin"], check=True, timeout=600)
                path.write_text(json.dumps(code_of(Path(scratch, "kernel.cubin").read_bytes())))
        for name, code in json.loads(path.read_text()).items():
            if found.setdefault(name, code) != code:
                raise SystemExit(f"two sources make {name}")
        print(f"{len(done)} {source.kernels[0]}", file=sys.stderr)
    return found


def main(checkout: str = "", pattern: str = "") -> int:
    """Print a line for each kernel that differs, and how many do not."""
    mine = hashes(pattern)
    if not checkout:
        print(json.dumps(mine, indent=1))
        return 0
    program = f"import sys; sys.path[:0] = [{checkout!r}]; __name__, __file__ = 'cubins', {__file__!r}\n"
    program += f"exec(open(__file__).read()); print(json.dumps(hashes({pattern!r})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    other = json.loads(done.stdout)
    for name in sorted(mine.keys() ^ other.keys()):
        print(f"{name}: only {'here' if name in mine else 'there'}")
    both = sorted(mine.keys() & other.keys())
    changed = [name for name in both if mine[name] != other[name]]
    print(*(f"{name}: changed" for name in changed), f"{len(both) - len(changed)} identical", sep="\n")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
