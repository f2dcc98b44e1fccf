"""The gates of P1 to P6 fed from a user's own files, each once whole and once with one thing wrong."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab.cli import main
from tests.loops import over
from tests.refused import held
from tests.study.own_files import jsonl, kineto, kl, ncu, row, sqlite, vllm

Capture = pytest.CaptureFixture[str]
Files = list[tuple[str, Path]]
BEFORE = [("convert_unary<float>", 40.0), ("mul_mat_q<8>", 60.0)] * 4
AFTER = [("convert_unary<float>", 5.0), ("bf16_residual_add", 3.0), ("mul_mat_q<8>", 60.0)] * 4


def put(folder: Path, arm: str, name: str, text: str) -> tuple[str, Path]:
    """A file of an arm: "control", or "candidate@WORKLOAD"."""
    path = folder / f"{arm.replace('@', '_')}_{name}"
    path.write_text(text)
    return arm, path


def p1(at: Path, wrong: bool) -> tuple[Files, list[str]]:
    """wrong: the candidate's kernel never ran."""
    after = BEFORE if wrong else AFTER
    files = [("control", sqlite(at / "c.sqlite", BEFORE)), ("candidate", sqlite(at / "d.sqlite", after))]
    files += [put(at, "control", "kl.log", kl()), put(at, "candidate", "kl.log", kl(0.1301, top=84.9))]
    counts = jsonl(row("token_mismatches", 0, "tokens"), row("failures", 0, "cases"))
    files += [put(at, "candidate", "counts.jsonl", counts)]
    return files, ["convert_share:category=layout_or_convert", "engagements:kernel=bf16_residual"]


def p2(at: Path, wrong: bool) -> tuple[Files, list[str]]:
    """wrong: the region is no faster."""
    arms = {"control": [("mul_mat_id_q", 300.0)] * 2, "candidate": [("expert_major", 297.0 if wrong else 200.0)] * 2}
    files = [put(at, f"{arm}@n257", "torch.json", kineto(kernels)) for arm, kernels in arms.items()]
    for workload in ("sentinel", "q36"):
        files += [("candidate@" + workload, sqlite(at / f"{workload}.sqlite", arms["candidate"]))]
    files += [put(at, f"{arm}@q36", "kl.log", kl()) for arm in arms]
    return files, ["region_us:kernel=mul_mat_id|expert_major,calls=2", "engagements:kernel=expert_major"]


def p3(at: Path, wrong: bool) -> tuple[Files, list[str]]:
    """wrong: milliseconds in the place of tokens per second."""
    files = [("candidate", sqlite(at / "a.sqlite", [("w4a16_direct", 9.0)]))]
    files += [put(at, "candidate", "kl.log", kl(0.12))]
    for arm, tps in (("control", 2000.0), ("candidate", 2200.0)):
        unit = "ms" if wrong and arm == "candidate" else "t/s"
        rows = [row("prefill_tps", tps + rep, unit, workload=w) for w in ("m512", "m1024", "m2048") for rep in range(3)]
        files += [put(at, arm, "prefill.jsonl", jsonl(*rows))]
    return files, ["engagements:kernel=w4a16"]


def p4(at: Path, wrong: bool) -> tuple[Files, list[str]]:
    """wrong: two runs were not finished."""
    files = [put(at, "candidate", "same.csv", "metric,value,unit\ntoken_mismatches,0,tokens\n")]
    for arm, ttft in (("control", 900.0), ("candidate", 600.0)):
        for workload in ("n32", "n128"):
            for rep in range(14 if wrong and arm == "candidate" else 15):
                text = vllm(ttft + rep % 3, 400.0 + rep % 2)
                files += [put(at, f"{arm}@{workload}", f"{rep}.json", text)]
    return files, []


def p5(at: Path, wrong: bool) -> tuple[Files, list[str]]:
    """wrong: shared memory without its unit."""
    files = []
    for arm, us in (("control", 400.0), ("candidate", 300.0)):
        files += [put(at, f"{arm}@npp2048", "ncu.csv", ncu([("gated_delta_net", us), ("mul_mat_q", 900.0)]))]
        files += [put(at, arm, "kl.log", kl(0.13))]
    files += [put(at, "candidate", "smem.csv", f"metric,value,unit\nsmem_max,96,{'' if wrong else 'KB'}\n")]
    return files, ["gdn_us_per_token:category=gdn_recurrence,tokens=2048"]


def p6(at: Path, wrong: bool) -> tuple[Files, list[str]]:
    """wrong: a capture that is cut off."""
    files: Files = []
    for workload in ("dense", "moe"):
        path = sqlite(at / f"{workload}.sqlite", [("flash_attn", 200.0), ("mul_mat_q", 800.0)] * 3)
        path.write_bytes(path.read_bytes()[: 4000 if wrong else None])
        files += [(f"control@{workload}", path)]
        for arm, tps in (("control", 100.0), ("candidate", 106.0)):
            rows = [{"tokens_per_second": tps + rep / 10, "kv": arm} for rep in range(3)]
            files += [put(at, f"{arm}@{workload}", "decode.jsonl", jsonl(*rows))]
    return files, ["decode_saving_max:category=attention,speedup=2", "decode_tps:column=tokens_per_second,unit=tok/s"]


Make = Callable[[Path, bool], tuple[Files, list[str]]]
CASES: dict[str, tuple[Make, str, str, Sequence[str]]] = {
    "p1": (p1, "GO", "VACUOUS", ["engagements 0 launches"]),
    "p2": (p2, "GO", "NO-GO", ["region_us -1.00 % (300 -> 297 us)"]),
    "p3": (p3, "GO", "", ["candidate_prefill.jsonl line 1", "ms", "tok/s"]),
    "p4": (p4, "GO", "BLOCKED", ["runs_complete 58 runs"]),
    "p5": (p5, "GO", "BLOCKED", ["smem_max has no unit"]),
    "p6": (p6, "CONDITIONAL-GO", "", ["dense.sqlite"]),
}


def test_every_gate_from_own_files(tmp_path: Path, capsys: Capture) -> None:
    @over({name: (name, *case) for name, case in CASES.items()})
    def each(name: str, make: Make, whole: str, broken: str, said: Sequence[str]) -> None:
        for wrong, word in ((False, whole), (True, broken)):
            folder = tmp_path / f"{name}-{wrong}"
            folder.mkdir()
            files, metrics = make(folder, wrong)
            flags = [part for arm, path in files for part in ("--rows", f"{arm}={path}")]
            flags += [part for metric in metrics for part in ("--metric", metric)]
            code = main.main(["judge", name, *flags, "--json"])
            out, err = capsys.readouterr()
            if not word:
                assert (code, out) == (2, "")
                held(err, said[0], *said)
                continue
            (found,) = json.loads(out)
            assert (code, found["verdict"]) == (0, word), found["reason"]
            assert all(text in found["reason"] for text in said) or not wrong, found["reason"]
            assert all(claim["verdict"] == "GO" for claim in found["claims"]) or name == "p1", found["claims"]

    each()
