"""Weights as GGUF: read back by the package gguf, value for value, and run in llama.cpp's order of heads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.step import cases
from kernels.step.model import Model
from kernels.step.peers import gguf_file, llama_cpp
from kernels.step.reference import weight
from kernels.step.tiny import train
from lab.study import own
from tests.refused import held

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install 'killgate[gguf]'")

# Four value heads to two key heads, and every K a multiple of ggml's 64.
MODEL = Model(4, 128, 192, 4, 2, 32, 2, 4, 32, 97, rotary=16)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return cases.weights(MODEL, 3, "cpu")


def read(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the reader, every tensor dequantised by the package, with its .scale)."""
    reader = gguf.GGUFReader(path)
    found = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    for name in [n for n in found if n.endswith(".scale")]:
        found[name.replace(".scale", ".weight")] *= found.pop(name)
    return reader, found


@pytest.mark.parametrize("form", gguf_file.FORMS)
def test_the_file_holds_the_weights(tmp_path: Path, weights: dict[str, torch.Tensor], form: str) -> None:
    path = tmp_path / "w.gguf"
    gguf_file.write(path, MODEL, weights, form)
    reader, found = read(path)
    for name in MODEL.linears():
        wanted = gguf_file.ordered(MODEL, f"{name}.weight", weight(weights, name).float())
        got = found[gguf_file.name_of(f"{name}.weight")]
        if form == "nvfp4":
            assert torch.equal(got, wanted), name
        else:  # half a step, and 127 times the rounding of the step to fp16
            step = wanted.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True) / 127
            assert bool(((got - wanted).unflatten(1, (-1, 32)).abs() <= 0.57 * step).all()), name
    assert torch.equal(found["output.weight"], weights["lm_head.weight"].float())
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN35]}
    stems = {n.rpartition(".")[0] if n.endswith((".weight", ".bias")) else n for n in found}
    assert {".".join(["blk", "{bid}", *s.split(".")[2:]]) if s.startswith("blk.") else s for s in stems} <= known
    assert reader.get_field("general.architecture").contents() == "qwen35"
    assert sum(reader.get_field("qwen35.rope.dimension_sections").contents()) == MODEL.rotary // 2


def test_in_the_order_of_llama_cpp_the_model_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    """There value head i reads key head i mod Hk, so keys are tiled where ours are repeated; gains carry their 1."""
    tokens = torch.randint(MODEL.vocab, (2, 20), generator=torch.Generator().manual_seed(1))
    plain = {n: v.float() for n, v in weights.items() if ".weight_" not in n}
    plain |= {f"{n}.weight": weight(weights, n).float() for n in MODEL.linears()}
    wanted = train.forward(MODEL, plain, tokens)
    path = tmp_path / "w.gguf"
    gguf_file.write(path, MODEL, weights, "nvfp4")
    _, found = read(path)
    theirs = {"inv_freq": weights["inv_freq"]}
    for name in [f"{n}.weight" for n in MODEL.linears()] + list(MODEL.others()):
        value = found[gguf_file.name_of(name)]
        if name.endswith("A_log"):
            value = (-value).log()
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value - 1
        theirs[name] = value[:, None] if name.endswith("conv1d.weight") else value
    monkeypatch.setattr(
        torch.Tensor, "repeat_interleave", lambda x, count, dim: torch.cat([x] * count, dim), raising=True
    )
    assert torch.allclose(train.forward(MODEL, theirs, tokens), wanted, rtol=0, atol=1e-4)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="nvfp4, q8_0"):
        next(gguf_file.tensors(MODEL, {}, "q4"))
    monkeypatch.setattr(
        sys, "argv", ["gguf_file", "--model", "odd", "--device", "cpu", "--out", str(tmp_path / "w.gguf")]
    )
    with pytest.raises(SystemExit) as left:
        gguf_file.main()
    assert left.value.code == 2
    held(capsys.readouterr().err, "w.gguf", "multiple of 64")


# llama-batched-bench, stood in for by a program that prints its lines -------------------------------------------------

BENCH = """import json, sys
words = sys.argv
value = lambda name: words[words.index(name) + 1]
print("build: 8123 (abcdef1) with cc", file=sys.stderr)
print("ggml_cuda_init: found 1 CUDA devices:\\n  Device 0: NVIDIA H200, compute capability 9.0", file=sys.stderr)
print("loaded meta data with 30 key-value pairs from " + value("-m") + " (version GGUF V3)", file=sys.stderr)
assert int(value("-c")) >= 32 * 192
for n in map(int, value("-npl").split(",")):
    pp, tg = int(value("-npp")), int(value("-ntg"))
    row = {"is_pp_shared": 0, "pp": pp, "tg": tg, "pl": n, "t_pp": 0.5, "speed_pp": n * pp / 0.5}
    print(json.dumps(row | {"t_tg": 2.0, "speed_tg": n * tg / 2.0}))
"""


def bench(folder: Path, text: str) -> Path:
    path = folder / "llama-batched-bench"
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_users_binary_gives_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, out = bench(tmp_path, BENCH), tmp_path / "rows.jsonl"
    words = ["--binary", str(binary), "--model", "step.gguf", "--npl", "1,32", "--npp", "128", "--ntg", "64"]
    monkeypatch.setattr(sys, "argv", ["peer", *words, "--out", str(out)])
    llama_cpp.main()
    found = own.read(out)
    speeds = {(s.metric, s.axes["npl"]): s.values for s in found.samples}
    assert speeds[("decode_tps", 32)] == (32 * 64 / 2,)
    assert speeds[("prefill_tps", 1)] == (128 / 0.5,)
    made = found.samples[0].made
    assert (made.build_commit, made.gpu_info, made.model_filename) == ("abcdef1", "NVIDIA H200", "step.gguf")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit('no memory')", "no memory"),
        (BENCH.replace('split(",")', 'split(",")[:1]'), "npl 32"),
        ("print('{')", "llama-batched-bench"),
    ],
)
def test_a_binary_that_fails_leaves_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--binary", str(bench(tmp_path, text)), "--model", "step.gguf", "--npl", "1,32", "--npp", "128"]
    monkeypatch.setattr(sys, "argv", ["peer", *words, "--ntg", "64", "--out", str(out)])
    with pytest.raises(SystemExit) as left:
        llama_cpp.main()
    assert left.value.code == 2
    held(capsys.readouterr().err, "llama-batched-bench", said)
    assert not out.exists()
