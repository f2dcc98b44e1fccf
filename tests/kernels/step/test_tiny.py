"""The tiny model: what it computes, that it has learnt, and the gates on its logits, each also once wrong."""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kernels.nvfp4 import format as nvfp4
from kernels.step import cases
from kernels.step.model import Model
from kernels.step.reference import reference
from kernels.step.tiny import corpus, engine, measure, say, train
from kernels.step.tiny.engine import Arm, Batch, Engine, arm_of
from kernels.step.tiny.stored import MODELS, RECURRENT, WEIGHTS, load, save
from kernels.step.torch_eager import PLAIN
from lab.card import phases
from lab.cli import main
from lab.study import crossbleed, identity
from lab.study.own import verdict
from tests.refused import held

MB = 1 << 20
WORDS = tuple[str, ...]


@cache
def weights(path: Path = WEIGHTS) -> dict[str, torch.Tensor]:
    return load(path)


def text(count: int, length: int) -> torch.Tensor:
    return corpus.batch(count, length, random.Random(5))[0]


# What it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_decoding_and_the_reference_compute_the_same() -> None:
    """Chunks of the recurrence for autograd, the engine in any pattern of steps, and float64 token by token."""
    model, w = MODELS["tiny"], weights()
    tokens = text(3, 80)[:, :-1]
    whole = train.forward(model, {name: value.float() for name, value in w.items()}, tokens)
    for words in (("weights=f32", "stream=f32"), ("weights=f32", "stream=f32", "batch=alone")):
        exact = Engine(arm_of(words), w)
        for pattern in ((1,), (80,), (1, 12, 3)):
            assert torch.allclose(exact.score(tokens, pattern), whole, rtol=0, atol=2e-3), pattern
    state = cases.empty(model, 3, 80, "cpu", torch.float64)
    bounds = torch.tensor([0, 80, 160, 240])
    made = {"tokens": tokens.flatten(), "cu_seqlens": bounds, "seq_lens": torch.zeros(3, dtype=torch.int32)}
    assert torch.allclose(reference(w | state | made)["logits"].float(), whole[:, -1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1, 1), (9, 9), (1, 12, 3), (12, 1, 2, 1, 12)], ids=str)
def test_sequences_side_by_side_have_the_bits_of_one_after_the_other(lengths: tuple[int, ...]) -> None:
    model, draw = MODELS["tiny"], torch.Generator().manual_seed(len(lengths))
    heads, dim, count, bounds = model.gdn_v_heads, model.gdn_dim, len(lengths), [0, *accumulate(lengths)]
    channels = (2 * model.gdn_k_heads + heads) * dim

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    for dtype, state_dtype in product((torch.float32, torch.bfloat16), repeat=2):
        for rows in (torch.randperm(count + 1, generator=draw)[:count].tolist(), [1] * count):
            args: engine.Args = {
                "A_log": drawn(heads),
                "dt_bias": drawn(heads),
                "conv1d.weight": drawn(channels, 1, 4, dtype=dtype),
            }
            args |= {"rows": rows, "spans": list(pairwise(bounds))}
            new = [drawn(bounds[-1], width, dtype=dtype) for width in (channels, heads, heads)]
            held = drawn(count + 1, heads, dim, dim, dtype=state_dtype), drawn(count + 1, 3, channels, dtype=dtype)
            one, other = (tuple(t.clone() for t in held) for _ in range(2))
            assert torch.equal(engine.delta_rule(args, "", *new, *one), PLAIN.delta_rule(args, "", *new, *other))
            assert all(map(torch.equal, one, other))
            assert not any(map(torch.equal, one, held))


def test_a_pattern_that_does_not_fit_and_forms_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        Engine(Arm(), weights()).score(text(1, 20)[:, :-1], (1, 12, 3))
    wrong = {
        "state_dtype=f16": "state_dtype='f16'",
        "residual=f32": "'residual'",
        "weights=f32 products=w4a8": "weights='nvfp4'",
    }
    for words, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            arm_of(words.split())
    with pytest.raises(ValueError, match="no character"):
        corpus.encode("É")


@pytest.mark.parametrize("value", [0.3, -1.7, 100.0])
def test_formats_round_as_their_families_do(value: float) -> None:
    row = torch.tensor([[value, 448.0, 0.0, -3.0] * 4])
    assert torch.equal(engine.e4m3(row), row.to(torch.float8_e4m3fn).float())
    assert float((engine.e2m1(row)[0, 1] - 448).abs()) < 1e-3
    x = torch.cat((row, row), dim=1)[:, None]
    for form, limit in (("bf16", 0.0), ("q8_0", 1.01 * 448 / 254), ("fp8", abs(value) / 16)):
        error = (engine.through_cache(Arm(cache=form), x) - x).abs()  # type: ignore[arg-type]
        assert float(error[..., 0].max()) <= limit


# Training -------------------------------------------------------------------------------------------------------------


def test_training_sees_nvfp4_values_and_passes_their_gradient() -> None:
    rng = torch.Generator().manual_seed(1)
    w = {n: torch.randn(rows, 64, generator=rng).requires_grad_() for n, rows in (("large", 48), ("small", 16))}
    seen = train.rounded(w)
    own = nvfp4.dequantise(nvfp4.quantise(torch.cat(list(w.values())).detach()))
    assert torch.allclose(torch.cat(list(seen.values())).detach(), own, rtol=1e-6, atol=1e-6)
    (seen["large"].sum() + 2 * seen["small"].sum()).backward()
    assert [w[n].grad.unique().tolist() for n in w] == [[1.0], [2.0]]  # type: ignore[union-attr]


SMALL = Model(4, 64, 64, 2, 1, 32, 1, 2, 16, len(corpus.VOCAB), rotary=8, theta=1e4)


@pytest.mark.slow
def test_training_repeats_and_learns(tmp_path: Path) -> None:
    first, losses = train.train(SMALL, 50, 8, 48, 6e-3, 3, "cpu")
    again, other = (train.train(SMALL, 3, 8, 48, 6e-3, 3, "cpu")[0] for _ in range(2))
    assert all(torch.equal(again[name], other[name]) for name in again)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.8
    save(tmp_path / "w.npz", first)
    stored = load(tmp_path / "w.npz")
    assert stored.keys() == first.keys()
    for name, value in stored.items():
        assert torch.equal(value, first[name].bfloat16() if value.ndim > 1 else first[name])


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "w.npz"
    for content in (b"", b"PK", b"PK\3\4 and nothing behind it"):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"w\.npz.*kernels\.step\.tiny\.train"):
            load(broken)
    save(broken, {"lm_head.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="tiny"):
        Engine(Arm(), load(broken))


# What it has learnt ---------------------------------------------------------------------------------------------------


def test_the_weights_are_small() -> None:
    assert WEIGHTS.stat().st_size + RECURRENT.stat().st_size <= 8 * MB


def right(path: Path, words: WORDS = (), without: str = "") -> dict[str, int]:
    """Questions of 32 that are answered. without: what part's product adds nothing."""
    w = {n: 0 * v if without and without in n else v for n, v in weights(path).items()}
    model, rng, found = Engine(arm_of(words), w), random.Random(7), {}
    for kind, size in measure.SIZES.items():
        asked = corpus.questions(kind, 32, rng, size)
        found[kind] = measure.right(measure.replies(model, asked, 8), asked)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("weights=f32", "stream=f32")], ids=["nvfp4", "exact"])
@pytest.mark.parametrize("path", [WEIGHTS, RECURRENT], ids=lambda path: path.stem)
def test_it_recalls_copies_and_knows_code_words(path: Path, words: WORDS) -> None:
    """Chance is 5 % for one letter, next to nothing for a word."""
    assert all(count >= 29 for count in right(path, words).values())


@pytest.mark.slow
def test_one_recalls_by_attention_and_one_by_its_states() -> None:
    assert all(count <= 4 for count in right(WEIGHTS, without="o_proj").values())
    assert all(count >= 29 for count in right(RECURRENT, without="self_attn.o_proj").values())


# The gates ------------------------------------------------------------------------------------------------------------


LOGITS = measure.Size(8, 48, gaps=(128,), slots=())
SLOTS = measure.Size(4, 48, gaps=())


class Kept(Engine):
    """An engine whose answers are kept: most gates ask the default arm and the exact one the same."""

    answers: ClassVar[dict[Any, Any]] = {}

    def __init__(self, arm: Arm, given: dict[str, torch.Tensor], device: str = "cpu") -> None:
        super().__init__(arm, given, device)
        self.given = given

    def once(self, ask: Callable[..., Any], *asked: Any) -> Any:
        path = next(path for path in (WEIGHTS, RECURRENT) if weights(path) is self.given)
        key = (ask.__name__, self.arm, path, repr([x.tolist() if isinstance(x, torch.Tensor) else x for x in asked]))
        if key not in self.answers:
            self.answers[key] = ask(*asked)
        return self.answers[key]

    def score(self, *asked: Any) -> torch.Tensor:
        return self.once(super().score, *asked)

    def greedy(self, *asked: Any) -> list[list[int]]:
        return self.once(super().greedy, *asked)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "Engine", Kept)


@cache
def rows(*words: str, against: WORDS = (), size: measure.Size = LOGITS, path: Path = WEIGHTS) -> list[measure.Row]:
    return measure.measure(arm_of(words), weights(path), arm_of(against), size)


def judged(folder: Path, card: str, control: list[measure.Row], candidate: list[measure.Row]) -> Any:
    """The verdict of `lab judge CARD --rows` on two tables."""
    for name, found in (("control", control), ("candidate", candidate)):
        with (folder / f"{name}.csv").open("w", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([measure.Row._fields, *found])
    files = [f"{name}={folder / name}.csv" for name in ("control", "candidate")]
    return verdict.judge(phases.card(card), files, device="h200").judgement.verdict


GATES: list[tuple[str, Path, WORDS, WORDS, measure.Size]] = [
    ("lp13-logits", RECURRENT, (), ("state_dtype=bf16",), LOGITS),
    ("lp14-logits", WEIGHTS, ("stream=f32",), (), LOGITS),
    ("lp16-logits", WEIGHTS, (), ("products=w4a8",), LOGITS),
    ("lp18-logits", WEIGHTS, (), ("cache=fp8",), LOGITS),
    ("lp18-q8-logits", WEIGHTS, (), ("cache=q8_0",), LOGITS),
    ("lb10-last-token", WEIGHTS, ("logits=all",), (), LOGITS),
    ("ds6-tokens", WEIGHTS, ("logits=all",), (), LOGITS),
    ("ik1-cross-bleed", RECURRENT, ("pool=shared", "batch=alone"), (), SLOTS),
    ("ik2-decomposition", RECURRENT, ("weights=f32", "batch=alone"), ("weights=f32",), SLOTS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("card", "path", "control", "candidate", "size"), GATES)
def test_a_gate_passes(
    tmp_path: Path, card: str, path: Path, control: WORDS, candidate: WORDS, size: measure.Size
) -> None:
    before = rows(*control, size=size, path=path)
    found = judged(tmp_path, card, before, rows(*candidate, against=control, size=size, path=path))
    assert found.word == "GO", found


@pytest.mark.slow
def test_hashes_of_both_models_are_a_registry(tmp_path: Path) -> None:
    """Of two files an arm; a form of other rounding has another hash on one of the models."""

    def table(path: Path, *words: str, against: WORDS = ()) -> list[measure.Row]:
        return measure.measure(arm_of(words), weights(path), arm_of(against), LOGITS, name=path.stem)

    for words, word in (((), "GO"), (("products=w4a4",), "NO-GO")):
        before = [row for path in (WEIGHTS, RECURRENT) for row in table(path, "logits=all")]
        after = [row for path in (WEIGHTS, RECURRENT) for row in table(path, *words, against=("logits=all",))]
        assert judged(tmp_path, "lp19-hashes", before, after).word == word


class Wrong(Engine):
    """An engine with one thing wrong."""

    what = ""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        parts = self.parts
        if self.what == "narrow_residual":
            self.parts = replace(parts, add_norm=lambda x, *more: parts.add_norm(narrow(x), *more))
        if self.what == "clipped_activations":
            self.parts = replace(parts, linear=lambda args, name, x: parts.linear(args, name, x.clamp(-1, 1)))

    def feed(
        self, batch: Batch, new: Sequence[Sequence[int]], every: bool = False, members: Sequence[int] = ()
    ) -> torch.Tensor:
        if self.what == "first_token" and not every:
            return super().feed(batch, new, True, members)[list(accumulate(map(len, new), initial=0))[:-1]]
        found = super().feed(batch, new, every, members)
        if self.what == "narrow_state":
            batch.kept["state"] = narrow(batch.kept["state"])
        return found


def narrow(x: torch.Tensor) -> torch.Tensor:
    """Two bits of mantissa."""
    return x.to(torch.float8_e5m2).to(x.dtype)


WRONG = [
    ("narrow_state", "lp13-logits"),
    ("narrow_residual", "lp14-logits"),
    ("clipped_activations", "lp16-logits"),
    ("unread_scale", "lp18-logits"),
    ("first_token", "lb10-last-token"),
    ("clipped_activations", "ds6-tokens"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "card"), WRONG)
def test_a_wrong_arm_fails_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, card: str) -> None:
    """PARTIAL where the divergence is over its line and the words are still right."""
    path, control, candidate = next(gate[1:4] for gate in GATES if gate[0] == card)
    before = rows(*control, path=path)
    monkeypatch.setattr(Wrong, "what", what)
    if what == "unread_scale":
        monkeypatch.setattr(engine, "through_cache", lambda arm, x: x / 2 if arm.cache != "bf16" else x)
    built = iter((Wrong, Kept, Kept))  # the candidate, what its tokens are compared with, the reference
    monkeypatch.setattr(measure, "Engine", lambda *given: next(built)(*given))
    after = measure.measure(arm_of(candidate), weights(path), arm_of(control), LOGITS)
    found = judged(tmp_path, card, before, after)
    assert found.word in (("INVALID",) if what == "first_token" else ("NO-GO", "PARTIAL")), found


@pytest.mark.slow
def test_a_shared_pool_fails_the_gates_of_sequences(tmp_path: Path) -> None:
    before = rows("weights=f32", "batch=alone", size=SLOTS, path=RECURRENT)
    for words in (("pool=shared", "batch=alone"), ("pool=shared",)):
        shared = rows("weights=f32", *words, size=SLOTS, path=RECURRENT)
        for card in ("ik1-cross-bleed", "ik2-decomposition"):
            found = judged(tmp_path, card, before, shared)
            assert found.word in ("NO-GO", "PARTIAL"), (card, words, found)


# The harnesses of identity and code words -----------------------------------------------------------------------------


def recall(arm: Arm) -> crossbleed.Recall:
    def reply(words: Sequence[str]) -> list[str]:
        rng = random.Random(len(words))
        prompts = [corpus.encode("\n" + corpus.told(word, 24, rng)) for word in words]
        return [corpus.decode(tokens) for tokens in Engine(arm, weights(RECURRENT)).greedy(prompts, corpus.CODE)]

    return reply


def test_code_words_are_of_the_harness() -> None:
    assert (corpus.LETTERS, corpus.CODE) == (crossbleed.ALPHABET, crossbleed.LENGTH)


@pytest.mark.slow
def test_code_words_are_clean_with_a_row_each_and_not_over_the_dirty_pool() -> None:
    """In turn a sequence says the word of the one that had its row last; in one step all are lost."""
    sizes = (1, 2, 3, 4, 6, 7)
    for arm in (Arm(), Arm(batch="alone")):
        assert [b.status for b in crossbleed.run(recall(arm), sizes)] == ["clean"] * 6
    in_turn = crossbleed.run(recall(Arm(pool="shared", batch="alone")), sizes)
    assert [b.status for b in in_turn] == ["clean"] * 2 + ["dirty"] * 4
    assert (0, 2) in in_turn[2].bled
    together = [b.status for b in crossbleed.run(recall(Arm(pool="shared")), sizes)]
    assert (together[:2], "clean" in together[2:]) == (["clean"] * 2, False)


@pytest.mark.slow
def test_greedy_tokens_are_held_by_the_harness_of_identity() -> None:
    def produce(*words: str) -> identity.Produce:
        model = Engine(arm_of(words), weights())
        return lambda prompt, budget: model.greedy([corpus.encode("\n" + prompt)], budget)[0]

    rng = random.Random(2)
    suites = {kind: [q.removeprefix("\n") for q, _ in corpus.questions(kind, 1, rng, 6)] for kind in corpus.KINDS}
    profiles = {"control": produce(), "all": produce("logits=all"), "coarse": produce("products=w4a4")}
    found = identity.run(profiles, "control", suites, (20,))
    status = {name: {cell.status for cell in found if cell.profile == name} for name in profiles}
    assert status["all"] == {"identical"}
    assert "diverged" in status["coarse"]


@pytest.mark.slow
def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-m", "kernels.step.tiny.say", "--prompts", "{prompts_file}"]
    asked = ["crossbleed", "--np", "3", "--prompt", "!{word} some filler #", "--", *program]
    assert main.main(asked) == 0
    assert main.main([*asked, "pool=shared"]) == 1
    capsys.readouterr()
    for module, words in ((measure, ["state_dtype=f16"]), (say, ["state_dtype=f16", "--prompt", "x"])):
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit) as left:
            module.main()
        assert left.value.code == 2
        held(capsys.readouterr().err, "tiny", "state_dtype='f16'", "bf16, f32")


def test_commands_refuse_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "forward", lambda *_: pytest.fail("it trains"))
    out = ["--out", "w.npz", "--device", "cpu"]
    cases: list[tuple[Any, list[str], str]] = [
        (train, ["--out", "w.bin"], "w.bin"),
        (train, ["--out", "nowhere/w.npz"], "nowhere/w.npz"),
        (train, ["--out", "w.npz", "--device", "cuda"], "--device cuda"),
        (train, [*out, "--start", "none.npz"], "none.npz"),
        (train, [*out, "--start", str(WEIGHTS), "--model", "small"], "--model"),
        (measure, ["--device", "cuda"], "--device cuda"),
        (say, ["--device", "cuda:1", "--prompt", "x"], "--device cuda:1"),
    ]
    for module, words, said in cases:
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit) as left:
            module.main()
        assert left.value.code == 2, words
        held(capsys.readouterr().err, "tiny", said)
    for module, words in ((train, [*out, "--steps", "0"]), (measure, ["--length", "0"]), (say, ["--budget", "-1"])):
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit):
            module.main()
        assert "is no whole number from 1 on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_none_ends_the_training_and_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "w.npz"
    out.write_bytes(WEIGHTS.read_bytes())
    words = ["--out", str(out), "--device", "cpu", "--steps", "2", "--batch", "1", "--length", "8", "--rate", "1e30"]
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as left:
        train.main()
    assert left.value.code == 2
    held(capsys.readouterr().err, "tiny", "step 2", "smaller --rate")
    assert out.read_bytes() == WEIGHTS.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["w.npz"]
