"""Adapters for libraries that a user may have: none of them is needed to import, list, refuse or convert.

Marlin's layouts are decoded here from the register layout of mma.m16n8k16, thread by thread, by code that shares
nothing with the repacking; the fake operator in tests/kernels/test_peers_run.py multiplies with what this decodes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.common import load_operators, operator_library
from kernels.nvfp4 import cases
from kernels.nvfp4 import format as fmt
from kernels.nvfp4.peers import vllm_marlin
from kernels.nvfp4.reference import weights
from lab.base.errors import REPOSITORY
from lab.check import families
from tests.kernels.peer_layouts import marlin_codes, marlin_scales

# Import names of every library that an adapter may use, and what a user sees of them in a skip.
LIBRARIES = (
    "vllm", "fla", "einops", "flash_qla", "tilelang", "flashinfer", "humming", "quack", "cutlass", "deep_gemm",
    "triton_kernels",
)  # fmt: skip
PEERS = {
    "gdn": {
        "fla_chunk": "fla", "fla_fused_recurrent": "fla", "flash_qla_chunk": "flash_qla",
        "flashinfer_chunk": "flashinfer", "vllm_packed_decode": "vllm",
    },
    "kv": {
        "vllm_fa3": "vllm", "vllm_fa3_fp8": "vllm", "flashinfer_bf16": "flashinfer", "flashinfer_fp8": "flashinfer",
        "flashinfer_xqa_fp8": "flashinfer",
    },
    "moe": {
        "vllm_marlin_moe": "vllm", "humming_moe": "humming", "deep_gemm_moe": "deep_gemm",
        "triton_kernels_moe": "triton_kernels",
    },
    "nvfp4": {
        "vllm_marlin": "vllm", "humming_w4a16": "humming", "quack_w4a16": "quack",
    },
}  # fmt: skip
NAMES = [(family, name) for family, names in PEERS.items() for name in names]
# Loads every family in a process where those libraries cannot be found, and says why each peer cannot run there.
WITHOUT = f"""
import importlib.util, json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {LIBRARIES!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in {LIBRARIES!r} else find(name)
from lab.check import families
loaded = {{name: families.load(name) for name in {list(PEERS)!r}}}
print(json.dumps({{
    "unavailable": {{n: dict(f.unavailable) for n, f in loaded.items()}},
    "reasons": {{n: {{c: families.unmet(p, (9, 0)) for c, p in f.candidates.items()}} for n, f in loaded.items()}},
    "versions": [p.config(next(w for w in f.cases.WORKLOADS if not p.refuses(w)))
                 for f in loaded.values() for p in f.candidates.values()],
}}))
"""


# Without the libraries -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without() -> dict[str, dict[str, dict[str, str]]]:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_every_adapter_imports_without_its_library(without: dict[str, dict[str, dict[str, str]]]) -> None:
    for family in PEERS:
        assert [m for m in without["unavailable"][family] if m.startswith("peers/")] == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), NAMES)
def test_skip_names_the_missing_library(family: str, name: str, without: dict[str, dict[str, dict[str, str]]]) -> None:
    wanted = f"needs the package {PEERS[family][name]}, which is not installed"
    assert without["reasons"][family][name] == wanted


def test_the_list_above_is_complete() -> None:
    for family, names in PEERS.items():
        loaded = families.load(family)
        found = {n for n, module in loaded.modules.items() if module.startswith("peers/")}
        assert {n for n in found if loaded.candidates[n].needs.packages} == set(names), family


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_contract(family: str, name: str) -> None:
    """Tolerance and cost exist for what a peer takes, the row's line names the library; real shapes are taken."""
    loaded = families.load(family)
    peer = loaded.candidate(name)
    taken = [w for w in loaded.cases.WORKLOADS if not peer.refuses(w)]
    assert {w.role for w in taken} >= {"measure"}
    for workload in loaded.cases.WORKLOADS:
        if workload not in taken:
            assert str(peer.refuses(workload))
            continue
        limits = loaded.cases.tolerance(workload, peer.precision)
        assert all(0 < limit.relative_error < 0.1 and limit.reason for limit in limits.values())
        assert loaded.cost(workload, peer.precision).bytes > 0
        assert PEERS[family][name].split("_")[0] in peer.config(workload)


# Finding compiled operators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["shim/toypeer/_ops.abi3.so", "shim/toypeer/deep/_ops.cpython.so", "libs/_ops.so"])
def test_operators_are_found(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wheel's package, deeper in it, and beside a package whose Python was cut down."""
    for file in ("shim/toypeer/__init__.py", place):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.syspath_prepend(tmp_path / "shim")
    assert operator_library("toypeer", "_ops") == tmp_path / place
    assert operator_library("toypeer", "_other") is None
    assert "toypeer" not in sys.modules


def test_missing_operators_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "barepeer").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("barepeer", "no_such_package"):
        with pytest.raises(ImportError, match=rf"{package}.*_ops\*\.so.*install"):
            load_operators(package, "_ops")


# Marlin's layout -----------------------------------------------------------------------------------------------------


def test_marlin_first_word() -> None:
    """The first word's eight codes, as indices 16 k + n of a 16 x 16 block: the start of Marlin's published order."""
    order = vllm_marlin.tile_order()
    assert order.shape == (32, 4, 8, 2)
    assert (16 * order[0, 0, :, 0] + order[0, 0, :, 1]).tolist() == [0, 128, 8, 136, 16, 144, 24, 152]
    assert sorted((64 * order[..., 0] + order[..., 1]).flatten().tolist()) == list(range(1024))


@pytest.mark.parametrize(("n", "k"), [(64, 16), (64, 128), (192, 80), (320, 256)])
def test_marlin_weights_decode_to_our_codes(n: int, k: int) -> None:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + k))
    words = vllm_marlin.repack_weights(fmt.pack(codes))
    assert (words.shape, words.dtype) == ((k // 16, 2 * n), torch.int32)
    assert torch.equal(marlin_codes(words), codes)


@pytest.mark.parametrize("top", [126, 118, 64, 8])
@pytest.mark.parametrize(("n", "blocks"), [(64, 1), (192, 5)])
def test_marlin_scales_decode_to_ours(n: int, blocks: int, top: int) -> None:
    """Every normal e4m3 byte up to `top`, and zero: exact; small scales are raised by a power of two together."""
    scale = torch.randint(8, top + 1, (n, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(top))
    scale[0, 0], scale[1, 0] = top, 0
    packed, power = vllm_marlin.repack_scales(scale)
    assert packed.shape == (blocks, n)
    assert power == (126 - top) // 8
    wanted = scale.view(torch.float8_e4m3fn).double()
    assert torch.equal(marlin_scales(packed) * 2.0**-power, wanted)


def test_marlin_refuses_scales_that_it_cannot_hold() -> None:
    scale = torch.full((64, 2), 126, dtype=torch.uint8)
    scale[3, 1] = 7  # the largest subnormal e4m3 number beside the largest number
    with pytest.raises(ValueError, match=r"1 of 128\b.*\b448"):
        vllm_marlin.repack_scales(scale)
    # With a largest scale of 2^-2 everything is raised by 2^10, and the same small scale becomes exact.
    packed, power = vllm_marlin.repack_scales(torch.where(scale == 126, 40, scale).to(torch.uint8))
    assert power == 10
    assert marlin_scales(packed)[3, 1] * 2.0**-power == 7 * 2.0**-9


def test_marlin_takes_whole_tiles_only() -> None:
    with pytest.raises(ValueError, match=r"N=75\b.*K=64\b.*\b64\b.*\b16\b"):
        vllm_marlin.repack_weights(torch.zeros(75, 32, dtype=torch.uint8))


def test_marlin_weights_are_the_reference_weights() -> None:
    """Codes, block scales and tensor scale together, against the reference's own decoding: equal to the last bit."""
    workload = next(w for w in cases.WORKLOADS if not vllm_marlin.CANDIDATES[0].refuses(w))
    inputs = cases.inputs(workload, 0)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = marlin_codes(vllm_marlin.repack_weights(inputs["w_packed"])).long()
    packed, power = vllm_marlin.repack_scales(inputs["w_scale"])
    scale = marlin_scales(packed).repeat_interleave(16, dim=1) * 2.0**-power
    assert torch.equal(table[codes] * scale * inputs["w_tensor_scale"].double(), weights(inputs))


@pytest.mark.gpu
def test_marlin_repacking_equals_vllms_own() -> None:
    if operator_library("vllm", "_C_stable_libtorch") is None:
        pytest.skip("vllm's compiled operators are not installed")
    load_operators("vllm", "_C_stable_libtorch")
    packed = torch.randint(0, 256, (192, 128), dtype=torch.uint8, device="cuda")
    theirs = torch.ops._C.gptq_marlin_repack(packed.view(torch.int32).T.contiguous(), 256, 192, 4, False)
    assert torch.equal(vllm_marlin.repack_weights(packed), theirs)
