"""`lab export FAMILY CANDIDATE --shape ... OUT`: a folder that runs a kernel without Python, and tests itself.

    src/, kernel_*.cubin   the CUDA sources with the headers that they include, or what Triton compiled (and its PTX)
    killgate.h launcher.c  load, run, unload through the CUDA driver; the launch choice and the scalars are in run
    vectors/ case.h test.c inputs, prepared weights, the reference's outputs in float64, the family's limits
    Makefile export.json   `make check` builds with nvcc and runs the test; the shape, the choice, the sources' hash

The candidate's own Python says what is launched: it runs here on CPU tensors while launches are noted instead of made,
so no GPU is needed. Everything is for the one shape and device. Prepared operands (packed weights, tables) are tensors
like any other, in vectors/; the launcher takes pointers that start on 16 bytes, as the driver allocates them.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lab.base import devices
from lab.base.errors import BadInput
from lab.check import accuracy, families

if TYPE_CHECKING:
    from kernels.common import CudaSource

HERE = Path(__file__).parent / "standalone"
KINDS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
POISON = 0x7FC07FC0  # NaN as two bf16 numbers, as two fp16 numbers and as float32
SCALARS = {"int32": "int32_t", "int64": "int64_t", "float32": "float", "uint64": "uint64_t"}
TRITON = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "u8", "int8": "i8", "int32": "i32",
          "int64": "i64", "float8_e4m3fn": "fp8e4nv"}  # fmt: skip


@dataclass(frozen=True)
class Map:
    """A tensor map to be made: of the matrix at an address, by the arguments of cuTensorMapEncodeTiled."""

    address: int
    element: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    promotion: int
    swizzle: int


@dataclass(frozen=True)
class Noted:
    """A launch that was not made. source: what its kernel is compiled from, or is: a cubin and its PTX."""

    kernel: str
    source: CudaSource | tuple[bytes, str]
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    early: bool
    arguments: tuple[Any, ...]


@dataclass
class Noting:
    """Stands in for the device while a candidate's `run` is noted."""

    capability: tuple[int, int]
    sms: int
    launches: list[Noted] = field(default_factory=list)

    def load(self, source: CudaSource, name: str, device: int, shared_bytes: int = 0) -> Any:
        """In the place of `kernels.cuda.load`: nothing is compiled."""
        return SimpleNamespace(name=name, source=source, device=0, function=SimpleNamespace(ptr=0))

    def launch(
        self, kernel: Any, grid: Any, threads: int, arguments: Any, shared_bytes: int = 0, programmatic: bool = False
    ) -> None:
        """In the place of `kernels.cuda.launch`."""
        given = (kernel.name, kernel.source, (*grid, 1, 1)[:3], threads, shared_bytes, programmatic, tuple(arguments))
        self.launches.append(Noted(*given))

    def encoded(
        self,
        address: int,
        element: int,
        dims: Any,
        strides: Any,
        box: Any,
        promotion_bytes: int,
        swizzle: int | None = None,
    ) -> Any:
        """A tensor map that knows what it was asked to be."""
        from kernels.cuda_driver import PROMOTIONS, ROW_BYTES, SWIZZLES, TensorMap

        made = TensorMap(128)
        made.address = address
        last = PROMOTIONS[promotion_bytes], SWIZZLES[ROW_BYTES] if swizzle is None else swizzle
        made.noted = Map(address, element, tuple(dims), tuple(strides), tuple(box), *last)  # type: ignore[attr-defined]
        return made

    def most_clusters(self, function: int, size: int, threads: int, shared_bytes: int) -> int:
        """As an H200 holds them: of four or eight blocks, 120 of its 132 multiprocessors."""
        return (self.sms if size <= 2 else self.sms * 10 // 11) // size

    def triton(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In the place of JITFunction.run: compile as the launch would, and note it."""
        import torch
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = {p.name: p for p in kernel.params}
        given = {**dict(zip(names, args, strict=False)), **{n: v for n, v in options.items() if n in names}}
        signature, constants, attributes, passed = {}, {}, {}, []
        for index, (name, parameter) in enumerate(names.items()):
            value = given.get(name, parameter.default)
            one = isinstance(value, int) and not isinstance(value, bool) and value == 1
            if parameter.is_constexpr or value is None or (one and not parameter.do_not_specialize):
                signature[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TRITON[str(value.dtype).removeprefix("torch.")]
                aligned = True
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"
                aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
            passed.append(value if isinstance(value, torch.Tensor) else _scalar(signature[name], value))
        target = GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)
        chosen = {n: v for n, v in options.items() if n not in names}
        made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=chosen)
        if getattr(made.metadata, "global_scratch_size", 0):
            raise BadInput("lab export", f"{made.metadata.name} needs scratch of Triton's own", "export another kernel")
        ptx = made.asm["ptx"]
        entry = ptx[ptx.index(".entry") :]
        expected = entry[: entry.index("{")].count(".param")
        passed += [_scalar("u64", 0)] * (expected - len(passed))  # scratch that is not used
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
        shape = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
        count = int(threads.group(1)) if threads else 32 * made.metadata.num_warps
        name, binary = made.metadata.name, (made.asm["cubin"], ptx)
        self.launches.append(Noted(name, binary, shape, count, made.metadata.shared, False, tuple(passed)))

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, the device that is described stands for CUDA device 0, and nothing is launched."""
        import torch

        from kernels import cuda, cuda_driver
        from kernels.common import described_for

        facts = SimpleNamespace(multi_processor_count=self.sms, name="described")
        caches = (cuda_driver.tensor_map, cuda_driver.line_map, cuda_driver.word_map)
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(described_for(self.capability))
            enter(mock.patch.multiple(cuda, load=self.load, launch=self.launch))
            enter(mock.patch.multiple(cuda_driver, _encoded=self.encoded, most_clusters=self.most_clusters))
            enter(mock.patch.multiple(torch.cuda, get_device_properties=lambda *_: facts))
            enter(mock.patch.multiple(torch.cuda, get_device_capability=lambda *_: self.capability))
            with suppress(ImportError):  # without Triton there is nothing to stand in for
                jit = importlib.import_module("triton.runtime.jit").JITFunction
                enter(mock.patch.object(jit, "run", lambda kernel, *args, **more: self.triton(kernel, *args, **more)))
            for cache in caches:
                cache.cache_clear()
                stack.callback(cache.cache_clear)
            yield


def _scalar(kind: str, value: float) -> Any:
    import numpy

    of: Any = {"fp32": numpy.float32, "i32": numpy.int32, "i64": numpy.int64, "u64": numpy.uint64}[kind]
    return of(value)


@dataclass(frozen=True)
class Problem:
    """A noted call: its launches, every tensor that they point to by name, outputs, expected outputs and limits."""

    launches: list[Noted]
    tensors: Mapping[str, Any]
    outputs: Mapping[str, Any]
    expected: Mapping[str, Any]
    limits: Mapping[str, tuple[float, float]]
    config: str


def problem(family: families.Family, name: str, shape: str, device: devices.Device) -> Problem:
    """What a candidate launches for a shape on a device, on inputs of seed 0.

    Raises BadInput where the device or the candidate does not take it, or nothing that can be exported was launched.
    """
    import torch

    candidate, where = family.candidate(name), f"{family.name} {name}"
    if families.is_peer(family.modules[name]):
        raise BadInput(where, "calls a library", "export one of our own kernels (lab check lists them)")
    if why := families.unfit(candidate, device.capability):
        raise BadInput(where, why, "give --device with one that has it")
    workload = family.workload(shape)
    if why := candidate.refuses(workload):
        raise BadInput(where, why, "choose another candidate (lab routes) or another shape")
    noting = Noting(device.capability, int(device.fact("sms").value))
    try:
        inputs = family.cases.inputs(workload, 0, "cpu")
    except ValueError as wrong:  # what no kernel of the family takes, such as a K of half a block
        raise BadInput(where, f"{workload.id} has no inputs: {wrong}", "choose another shape") from None
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not initialised is then all one word
    try:
        with noting.instead():
            args = accuracy.prepared(family, candidate, inputs)
            out = family.cases.outputs(workload, inputs)
            for key, tensor in out.items():
                if str(tensor.dtype) not in KINDS:
                    what = f'the output "{key}" is {tensor.dtype}, which the exported test does not read'
                    raise BadInput(where, what, f"export one whose outputs are among {', '.join(KINDS)}")
            candidate.run(args, out)
            config = candidate.config(workload) or name
    finally:
        torch.use_deterministic_algorithms(before)
    if not noting.launches:
        remedy = "export a CUDA C++ or Triton candidate, without TRITON_INTERPRET"
        raise BadInput(where, "launches no kernel of its own", remedy)
    reference = accuracy.expected(family, workload, inputs, candidate.precision)
    accuracy.refuse_unlimited(family, workload, candidate.precision, out, reference)
    limits = {}
    for key, limit in family.cases.tolerance(workload, candidate.precision).items():
        told = accuracy.compare(key, reference[key].to(out[key].dtype), reference[key], limit)
        limits[key] = (told.relative_limit, told.max_limit)
    tensors = {**{n: t for n, t in args.items() if isinstance(t, torch.Tensor)}, **out}
    return Problem(noting.launches, tensors, out, reference, limits, config)


def _found(tensors: Mapping[str, Any], address: int) -> tuple[str, int]:
    """The name of the tensor that holds an address, and the offset in bytes."""
    for name, tensor in reversed(list(tensors.items())):  # outputs before inputs of the same name
        offset = address - tensor.data_ptr()
        if 0 <= offset < max(1, tensor.nbytes):
            return name, offset
    raise BadInput("lab export", "a launch points to memory of the candidate's own", "hand it out in `prepare`")


class Writer:
    """Writes one problem into a folder: standalone/ has the C text, this says what stands in it."""

    def __init__(self, made: Problem, folder: Path, capability: tuple[int, int]) -> None:
        self.made, self.folder, self.capability = made, folder, capability
        self.sources = list(dict.fromkeys(launch.source for launch in made.launches))
        self.used: list[str] = []  # tensors, in the order in which launches point to them
        modules = {source: number for number, source in enumerate(self.sources)}
        self.launches = [
            {**vars(launch), "module": modules[launch.source], "arguments": [*map(self._argument, launch.arguments)]}
            for launch in made.launches
        ]

    def _argument(self, argument: Any) -> dict[str, Any]:
        """An argument of a launch in C: its type and value, or the tensor map to make of the matrix at `value`."""
        import torch

        if isinstance(argument, torch.Tensor):
            return {"map": None, "type": "CUdeviceptr", "value": self._pointer(argument.data_ptr())}
        if isinstance(argument, bytes):
            told: Map = argument.noted  # type: ignore[attr-defined]
            return {"map": told, "value": self._pointer(told.address)}
        kind, value = argument.dtype.name, argument.item()
        return {"map": None, "type": SCALARS[kind], "value": f"{value.hex()}f" if kind == "float32" else value}

    def _pointer(self, address: int) -> str:
        name, offset = _found(self.made.tensors, address)
        if name not in self.used:
            self.used.append(name)
        return f"{name} + {offset}" if offset else name

    def write(self, title: str) -> None:
        """Everything but export.json."""
        (self.folder / "vectors").mkdir()
        rules = [rule for i, source in enumerate(self.sources) if (rule := self._source(i, source))]
        tensors = [self._tensor(name, self.made.tensors[name]) for name in self.used]
        signature = ", ".join(["const killgate *kernels", *(f"CUdeviceptr {n}" for n in self.used), "CUstream stream"])
        values: dict[str, Any] = {"title": title, "config": self.made.config, "tensors": tensors, "rules": rules}
        values |= {"signature": signature, "modules": len(self.sources), "launches": self.launches}
        values["checks"] = [*self._checks()]
        loader = FileSystemLoader(HERE)
        made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
        for template in sorted(HERE.glob("*.j2")):
            text = made.get_template(template.name).render(**values, poison=f"{POISON:#x}u")
            (self.folder / template.stem).write_text(text, encoding="utf-8")
        shutil.copy(HERE / "test.c", self.folder / "test.c")

    def _source(self, index: int, source: Any) -> dict[str, Any]:
        """Put a source where `make` finds it; returns what its rule is made of, {} for a cubin, which needs none."""
        from kernels import cuda

        if isinstance(source, tuple):
            (self.folder / f"kernel_{index}.cubin").write_bytes(source[0])
            (self.folder / f"kernel_{index}.ptx").write_text(source[1], encoding="utf-8")
            return {}
        path, kept = source.path.resolve(), []
        for text in cuda.texts(path, cuda.include_folders(source)):
            to = self.folder / "src" / text.relative_to(cuda.HEADERS)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(text, to)
            kept.append(to.relative_to(self.folder).as_posix())
        arch = cuda.architecture(source, self.capability)
        options = [*cuda.nvcc_architecture(arch), *source.options, f"-Isrc/{path.parent.name}", "-Isrc"]
        return {"index": index, "sources": kept, "options": options}

    def _tensor(self, name: str, tensor: Any) -> dict[str, Any]:
        """What the C text says of a tensor, and its file where it is not all one word."""
        fill, begins = _fill(tensor), f'"vectors/{name}.bin"'
        if name in self.made.limits and not bool(self.made.outputs[name].isfinite().any()):  # not updated in place
            fill = POISON
        if fill is None:
            (self.folder / f"vectors/{name}.bin").write_bytes(_bytes(tensor))
        else:
            begins = "0"
        said = {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "bytes": tensor.nbytes}
        return {"name": name, "begins": begins, "fill": f"{fill or 0:#x}u", **said}

    def _checks(self) -> Iterator[tuple[Any, ...]]:
        """The rows of CHECKS, and the file of each output that is expected."""
        for index, name in enumerate(self.used):
            if name in self.made.limits:
                wanted, limits = self.made.expected[name].double().cpu(), self.made.limits[name]
                (self.folder / f"vectors/{name}.expected.bin").write_bytes(_bytes(wanted))
                tensor = self.made.tensors[name]
                kind = KINDS[str(tensor.dtype)]
                yield index, f'"vectors/{name}.expected.bin"', tensor.numel(), kind, *map(repr, limits)


def _bytes(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _fill(tensor: Any) -> int | None:
    """The word of 32 bits that a tensor is full of, None where it is not."""
    import torch

    if not tensor.nbytes or tensor.nbytes % 4 or not tensor.is_contiguous():
        return None
    words = tensor.reshape(-1).view(torch.uint8).view(torch.int32)
    return int(words[0]) & 0xFFFFFFFF if bool((words == words[0]).all()) else None


def export(family: families.Family, name: str, shape: str, device: devices.Device, out: Path) -> Problem:
    """Write the folder, whole or not at all; raises BadInput as `problem` does and where `out` has something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(out, "is there already", "give the name of a new folder")
    made = problem(family, name, shape, device)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch, "export")
        folder.mkdir()
        Writer(made, folder, device.capability).write(f"{family.title}: {name}, {shape}, for {device.name}")
        said: dict[str, Any] = {"family": family.name, "candidate": name, "shape": shape, "device": device.id}
        said |= {"config": made.config, "sources": families.sources_hash(family.name)}
        said["kernels"] = [noted.kernel for noted in made.launches]
        (folder / "export.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return made


def run(arguments: Namespace) -> int:
    """Write the folder and say what to do there."""
    shape = arguments.shape.replace(",", " ") if "=" in arguments.shape else arguments.shape
    device = devices.get(arguments.device, "--device")
    made = export(families.load(arguments.family), arguments.candidate, shape, device, arguments.out)
    print(f"{arguments.out}: {made.config}\nmake -C {arguments.out} check   # on a machine with nvcc and {device.name}")
    return 0
