"""Weights as GGUF: read back by the package gguf, value for value, and run in llama.cpp's order of heads."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.step import cases, llama_logits
from kernels.step.model import Model
from kernels.step.peers import gguf_file, llama_cpp
from kernels.step.reference import reference, weight
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
        gguf_file.write(tmp_path / "w.gguf", MODEL, {}, "q4")
    odd = ["gguf_file", "--model", "odd", "--device", "cpu", "--out", str(tmp_path / "w.gguf")]
    for form, block in (("nvfp4", "multiple of 64"), ("q8_0", "multiple of 32")):
        monkeypatch.setattr(sys, "argv", [*odd, "--form", form])
        with pytest.raises(SystemExit) as left:
            gguf_file.main()
        assert left.value.code == 2
        held(capsys.readouterr().err, "w.gguf", block, "--model")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_before_there_are_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gguf_file.cases, "weights", lambda *_: pytest.fail("weights are made"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(gguf_file.MODELS, "small", MODEL)
    out = ["--out", str(tmp_path / "w.gguf")]
    asked = {
        f"the model has {MODEL.layers}": ["--model", "small", "--layers", "99", *out],
        "3 layers have no attention": ["--model", "small", "--layers", "3", *out],
        "folder": ["--model", "small", "--out", str(tmp_path / "nowhere" / "w.gguf")],
        "mixture": ["--model", "small-moe", *out],
        "18.8 GB of disk": out,
        "--device cuda": ["--model", "small", "--device", "cuda", *out],
    }
    for said, words in asked.items():
        room = shutil.disk_usage(tmp_path)._replace(free=10**9)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, room=room: room)
        monkeypatch.setattr(sys, "argv", ["gguf_file", *words])
        with pytest.raises(SystemExit) as left:
            gguf_file.main()
        assert left.value.code == 2, words
        held(capsys.readouterr().err, "w.gguf", said)
    assert not list(tmp_path.iterdir())


def test_a_file_that_could_not_be_finished_leaves_the_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "w.gguf"
    gguf_file.write(path, MODEL, weights, "nvfp4")
    whole = path.read_bytes()
    assert 0.9 < gguf_file.size(MODEL, "nvfp4") / len(whole) < 1

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("gguf.GGUFWriter.write_tensors_to_file", full)
    with pytest.raises(OSError, match="No space"):
        gguf_file.write(path, MODEL, weights, "nvfp4")
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["w.gguf"]


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


def test_a_prefill_without_decode_has_no_speed_of_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool divides no tokens by no time and prints nan."""
    out = tmp_path / "rows.jsonl"
    text = BENCH.replace('"speed_tg": n * tg / 2.0}))', '"speed_tg": float("nan")}).replace("NaN", "-nan"))')
    text = text.replace('assert int(value("-c")) >= 32 * 192', "")
    words = ["--binary", str(bench(tmp_path, text)), "--model", "step.gguf", "--npl", "1", "--npp", "192"]
    monkeypatch.setattr(sys, "argv", ["peer", *words, "--ntg", "0", "--out", str(out)])
    llama_cpp.main()
    assert [(s.metric, s.values) for s in own.read(out).samples] == [("prefill_tps", (192 / 0.5,))]


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


def test_a_bench_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llama_cpp, "run", lambda _: pytest.fail("it runs"))
    words = ["peer", "--binary", "b", "--model", "m.gguf"]
    for more, said in (
        (["--npl", "1,x"], "--npl 1,x"),
        (["--npl", "0"], "--npl 0"),
        (["--out", "nowhere/o"], "nowhere/o"),
    ):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as left:
            llama_cpp.main()
        assert left.value.code == 2
        held(capsys.readouterr().err, "llama_cpp", said)


# llama.cpp's logits beside ours ---------------------------------------------------------------------------------------

SIZES = MODEL.layers, MODEL.hidden, MODEL.vocab
TOKENS = torch.randint(MODEL.vocab, (3, 9), generator=torch.Generator().manual_seed(0))


def stand_in(answer: torch.Tensor) -> Any:
    """A llama_cpp that keeps what it is asked and gives `answer` [2, sequences, vocab], of the prompts and the step."""
    count, length = TOKENS.shape
    room = count * length
    batch = SimpleNamespace(n_tokens=0, token=[0] * room, pos=[0] * room, n_seq_id=[0] * room, logits=[False] * room)
    batch.seq_id = [[0] for _ in range(room)]
    calls: list[dict[tuple[int, int], tuple[int, bool]]] = []

    def decode(context: Any, batch: Any) -> int:
        assert batch.n_seq_id[: batch.n_tokens] == [1] * batch.n_tokens
        calls.append({
            (batch.seq_id[i][0], batch.pos[i]): (batch.token[i], batch.logits[i]) for i in range(batch.n_tokens)
        })  # fmt: skip
        return 0

    def logits_of(context: Any, i: int) -> list[float]:
        assert batch.logits[i]
        return [*map(float, answer[len(calls) - 1, batch.seq_id[i][0]]), 99.0]  # what lies behind it

    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(
        calls=calls, llama_log_callback=lambda f: f, llama_log_set=nothing, llama_backend_init=nothing,
        llama_model_default_params=SimpleNamespace, llama_context_default_params=SimpleNamespace,
        llama_model_load_from_file=lambda path, params: path.endswith(b".gguf"),
        llama_init_from_model=lambda model, params: params.n_ctx == room and params.n_seq_max == count,
        llama_model_n_layer=lambda model: MODEL.layers, llama_model_n_embd=lambda model: MODEL.hidden,
        llama_model_get_vocab=nothing, llama_vocab_n_tokens=lambda vocab: MODEL.vocab,
        llama_batch_init=lambda *_: batch, llama_decode=decode, llama_get_logits_ith=logits_of,
        llama_batch_free=nothing, llama_free=nothing, llama_model_free=nothing,
    )  # fmt: skip


def test_llama_cpp_is_asked_for_a_prompt_and_a_step_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = torch.randn(2, len(TOKENS), MODEL.vocab)
    library = stand_in(answer)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    prompt, step = llama_cpp.logits(Path("w.gguf"), TOKENS, SIZES)
    assert torch.allclose(prompt, answer[0])
    assert torch.allclose(step, answer[1])
    wanted = {(n, at): (int(TOKENS[n, at]), at == 7) for n in range(3) for at in range(8)}
    assert library.calls == [wanted, {(n, 8): (int(TOKENS[n, 8]), True) for n in range(3)}]
    with pytest.raises(ValueError, match=r"w\.bin"):
        llama_cpp.logits(Path("w.bin"), TOKENS, SIZES)
    with pytest.raises(ValueError, match="--layers"):  # logits of another vocabulary would be read past their end
        llama_cpp.logits(Path("w.gguf"), TOKENS, (MODEL.layers, MODEL.hidden, MODEL.vocab + 1))


def test_our_logits_are_those_of_the_whole_sequence(weights: dict[str, torch.Tensor]) -> None:
    """Prompt and step on what it left are the last two positions of the plain model."""
    plain = {n: v.float() for n, v in weights.items() if ".weight_" not in n}
    plain |= {f"{n}.weight": weight(weights, n).float() for n in MODEL.linears()}
    whole = train.forward(MODEL, plain, TOKENS)
    found = llama_logits.ours(MODEL, weights, TOKENS, reference)
    for place, logits in zip((7, 8), found, strict=True):
        same = llama_logits.beside(whole[:, place], logits)
        assert same["nmse"] < 1e-4  # caches and convolution's states between the two are bf16
        assert same["same_top"] == 1.0
    apart = llama_logits.beside(whole[:, 7], found[1])
    assert apart["nmse"] > 0.1
    assert apart["kl_nats"] > llama_logits.beside(whole[:, 7], found[0])["kl_nats"]


def test_stock_llama_cpp_gives_the_logits(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """On its CPU, which quantises activations to 8 bits; ours are in float64."""
    pytest.importorskip("llama_cpp", reason="needs the package llama-cpp-python")
    wanted = llama_logits.ours(MODEL, weights, TOKENS, reference)
    for form, most in (("nvfp4", 1e-3), ("q8_0", 1e-3)):
        gguf_file.write(path := tmp_path / f"{form}.gguf", MODEL, weights, form)
        for ours, other in zip(wanted, llama_cpp.logits(path, TOKENS, SIZES), strict=True):
            assert llama_logits.beside(ours, other)["nmse"] < most


def test_without_the_package_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(sys, "argv", ["llama_logits", "--file", "w.gguf", "--device", "cpu"])
    with pytest.raises(SystemExit) as left:
        llama_logits.main()
    assert left.value.code == 2
    held(capsys.readouterr().err, "w.gguf", "llama-cpp-python")
