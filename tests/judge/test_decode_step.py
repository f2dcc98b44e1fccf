"""lab/judge/decode_step.py: parts by hand, ceilings against the record, rows scaled by floors, room."""

from dataclasses import replace

import pytest

from lab.base import devices, models
from lab.judge import decode_step
from lab.judge.decode_step import ATTENTION, STATE, WEIGHTS, Part
from lab.place import roofline
from lab.row.records import Measurement
from tests.loops import numbered, over
from tests.refused import refused
from tests.row.made import changed, measurement

DENSE, MIXTURE = models.get("q36-27b"), models.get("q36-35b-a3b")
GB10, H200 = devices.get("gb10"), devices.get("h200")


def row(name: str, part: Part, us: float, **axes: int) -> Measurement:
    """A measured row of one call of `part`."""
    work = {"flops": part.flops, "bytes": part.bytes, "pipe": part.pipe}
    return measurement(name=name, median_us=us, workload=axes, workload_id=f"{name}-{axes}", **work)


def by_name(of: tuple[Part, ...]) -> dict[str, Part]:
    return {p.name: p for p in of}


def test_parts_by_hand() -> None:
    """8 sequences of 8,192 tokens on the dense model: 2 x 4 x 256 x 2 bytes a token and layer, 16 layers."""
    found = by_name(decode_step.parts(DENSE, 8, 8192))
    attention, state, weights = (found[n] for n in (ATTENTION, STATE, WEIGHTS))
    assert attention.calls == 16
    assert attention.bytes == 8 * 8192 * 4096 + 4 * 8 * 24 * 256
    assert attention.flops == 4 * 8 * 8192 * 24 * 256
    assert (state.calls, state.bytes) == (48, 8 * 48 * 128 * 128 * 4 * 2)
    assert (weights.calls, weights.bytes, weights.flops) == (1, 18e9, 2 * 27e9 * 8)
    assert by_name(decode_step.parts(DENSE, 8, 8192, 1.0))[ATTENTION].bytes == 8 * 8192 * 2048 + 4 * 8 * 24 * 256


def test_bytes_agree_with_what_the_sources_state() -> None:
    assert decode_step.cached_bytes(DENSE) == DENSE.fact("kv_bytes_per_token").base
    conv = 48 * (2 * 16 + 48) * 128 * 3 * 4
    assert decode_step.state_bytes(DENSE) == 48 * DENSE.fact("gdn_state_bytes").base + conv
    assert decode_step.cached_bytes(MIXTURE) == 20480


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    assert decode_step.experts_read(MIXTURE, 1) == pytest.approx(8 / 256)
    assert round(decode_step.experts_read(MIXTURE, 128), 2) == 0.98
    read = [decode_step.read_weight_bytes(MIXTURE, n) for n in (1, 8, 32, 128, 4096)]
    assert read == sorted(read)
    assert read[3] == MIXTURE.fact("weight_bytes").base
    assert read[0] > 0
    assert {decode_step.read_weight_bytes(DENSE, n) for n in (1, 128)} == {18e9}


@over(numbered([(DENSE, 512, 128, 3.44), (MIXTURE, 512, 128, 2.16), (DENSE, 8192, 8, 8.81), (MIXTURE, 8192, 8, 7.15)]))
def test_floors_come_near_the_recorded_ceilings(model, context: int, sequences: int, recorded: float) -> None:
    times = decode_step.floors(GB10, decode_step.parts(model, sequences, context, pipe="fp4"))
    assert decode_step.ceiling_pct(times, 0.5) == pytest.approx(recorded, rel=0.25)


def test_a_ceiling_grows_with_context_and_batch_and_what_is_saved() -> None:
    def ceiling(sequences: int, context: int, saved: float = 0.5) -> float:
        return decode_step.ceiling_pct(decode_step.floors(H200, decode_step.parts(DENSE, sequences, context)), saved)

    assert ceiling(1, 256) < ceiling(1, 8192) < ceiling(8, 8192) < ceiling(32, 32768)
    assert ceiling(8, 8192, 0.0) == 0
    assert ceiling(8, 8192, 30 / 64) < ceiling(8, 8192)


def test_rows_that_reach_the_floor_give_the_floor() -> None:
    of = decode_step.parts(DENSE, 8, 8192)
    floors = decode_step.floors(H200, of)
    rows = {p.name: [row("k", p, t.us / p.calls, batch=8, ctx=8192)] for p, t in zip(of, floors, strict=True)}
    found = decode_step.from_rows(H200, of, rows)
    assert [t.us for t in found] == pytest.approx([t.us for t in floors])
    assert decode_step.share(found) == pytest.approx(decode_step.share(floors))
    assert decode_step.total_us(found) == pytest.approx(sum(t.us for t in floors))


def test_the_nearest_row_is_scaled_by_its_fraction_of_the_roofline() -> None:
    of = decode_step.parts(DENSE, 32, 8192)
    attention = by_name(of)[ATTENTION]
    own = roofline.place(H200, attention.flops, attention.bytes, "bf16").floor_us
    near, far = (by_name(decode_step.parts(DENSE, n, 8192))[ATTENTION] for n in (16, 1))
    floor = {n: roofline.place(H200, p.flops, p.bytes, "bf16").floor_us for n, p in (("near", near), ("far", far))}
    rows = {p.name: [row("k", p, 1e3, batch=32, ctx=8192, M=32)] for p in of}
    rows[ATTENTION] = [
        row("far", far, floor["far"], batch=1, ctx=8192),
        row("slow", near, 5 * floor["near"], batch=16, ctx=8192),
        row("near", near, 2 * floor["near"], batch=16, ctx=8192),
        changed(row("wrong", near, 1.0, batch=32, ctx=8192), status="incorrect"),
    ]
    time = decode_step.from_rows(H200, of, rows)[0]
    assert time.us == pytest.approx(16 * 2 * own)  # half of the roofline there, so half of it here
    assert time.basis.startswith("near")


def test_a_product_is_found_by_its_tokens() -> None:
    of = decode_step.parts(DENSE, 8, 256)
    weights = by_name(of)[WEIGHTS]
    rows = {p.name: [row("k", p, 1e6, batch=8, ctx=256)] for p in of}
    small = replace(weights, bytes=weights.bytes / 100, flops=weights.flops / 100)
    floor = roofline.place(H200, small.flops, small.bytes, "bf16").floor_us
    rows[WEIGHTS] = [row("m1", small, floor, M=1), row("m8", small, 3 * floor, M=8)]
    time = decode_step.from_rows(H200, of, rows)[2]
    assert time.basis.startswith("m8")
    assert time.us == pytest.approx(300 * floor)


def test_bad_input_is_refused() -> None:
    of = decode_step.parts(DENSE, 8, 256)
    with refused("step of h200", '"attention"'):
        decode_step.from_rows(H200, of, {})
    for sequences, context in ((0, 256), (8, 0)):
        with refused("decode step", "sequences=", "context="):
            decode_step.parts(DENSE, sequences, context)
    with refused("q36-27b", "4096"):
        decode_step.room(DENSE, 141e9, 4096, 1024)


def test_room_by_hand() -> None:
    """100 GB less the file is 81.196 GB; 32 states take 5.02; a token 65,536 bytes."""
    found = decode_step.room(DENSE, 100e9, 32, 8192)
    free = 100e9 - 18.804e9
    state = decode_step.state_bytes(DENSE)
    assert found.tokens == int((free - 32 * state) / 65536)
    assert found.sequences == int(free / (state + 8192 * 65536))
    halved = decode_step.room(DENSE, 100e9, 32, 8192, 1.0)
    assert halved.tokens == pytest.approx(2 * found.tokens, abs=2)
    assert found.sequences < halved.sequences < 2 * found.sequences
