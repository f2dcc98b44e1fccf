"""From two arms to a verdict: the readings, what must be said beside them, and the page that `lab judge --rows` prints.

What makes two runs no comparison is refused in one line: another tool, another GPU or CPU, another backend, another
model, prompts or answers of another length; unless `--arm` names the backend or the model as what tells the arms apart.
What a reader must know is said in the note: arms from different builds (every change between them is then part of the
effect), arms that differ in nothing the files record, several settings changed at once, one repetition, unchecked
correctness, no interleaving. The evidence is called imported and never measured: this workbench neither ran nor checked
it.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import structs
from msgspec.structs import replace as replaced

from lab.base import console, devices, interval, vocabulary
from lab.base.errors import BadInput, refuse_unknown
from lab.bench import machine
from lab.card import history, phases
from lab.card.gate import Condition, Reading, arrival_of
from lab.judge import verdicts
from lab.row import store
from lab.row.records import Kept
from lab.study.own import arms as which
from lab.study.own import backend_ops, batched_bench, read
from lab.study.own.arms import ARMS, Match
from lab.study.own.sample import Asked, Imported, Sample, base_name

METRICS = ("decode_tps", "prefill_tps", "kernel_us")  # asked of any file, that a reason says what is missing of them
NORMAL = 1.96  # standard errors to either side of a figure that its tool printed with one
BUILD = ("build_commit", "build_number")
MODEL = ("model_filename", "model_type", "model_size", "model_n_params")
HARDWARE = ("gpu_info", "cpu_info")
# What may be the question of an A/B, and then is named in --arm.
NAMEABLE = ("backends", "backend_name", "n_gpu_layers", "model_filename")
ALL_LAYERS = 99  # llama.cpp's word for all layers on the GPU, as are more and, in other versions, a negative number
# By how much the tokens per request may differ. The same data set and seed give the same prompts, to the few tokens
# that a tokenizer adds; answers end where the model ends them, which a change's rounding moves by some per cent.
LOADS = {"input tokens per request": 0.05, "output tokens per request": 0.10}
# llama-batched-bench fills all its sequences before the first step: there is nothing to arrive later.
ARRIVAL = {batched_bench.TOOL: "burst"}
UNKNOWN = "device not stated"
FEW = 3  # repetitions from which a standard deviation is worth its name


@dataclass(frozen=True)
class Outcome:
    """A verdict on imported evidence with everything that it rests on."""

    judgement: verdicts.Judgement
    matches: tuple[Match, ...]
    files: tuple[tuple[str, Imported], ...]
    notes: tuple[str, ...]
    readings: Mapping[tuple[str, str], Reading]

    def to_json(self) -> dict[str, Any]:
        """The judgement's object with `imported`: the files, the mapping and the warnings."""
        read = [
            {"file": i.path.name, "tool": i.tool, "arm": arm or None, "figures": len(i.samples)}
            for arm, i in self.files
        ]
        imported = {"files": read, "mapping": [_mapping(m) for m in self.matches], "warnings": list(self.notes)}
        return {**self.judgement.to_json(), "imported": imported}


def judge(
    card: phases.Card,
    rows: Sequence[str],
    arm_flags: Sequence[str] = (),
    map_flags: Sequence[str] = (),
    device: str | None = None,
    metric_flags: Sequence[str] = (),
) -> Outcome:
    """Hold a card's gate against somebody's own files; raises BadInput for what cannot be compared at all.

    rows:      values of `--rows`; arm_flags, map_flags: values of `--arm` and `--map` (see lab/study/own/arms.py).
    device:    the GPU, where the files do not name one.
    metric_flags: values of `--metric`, which say how a metric is read of a table or a profile (plain.py, profiles.py).
    """
    selectors, maps = _once("--arm", arm_flags), _once("--map", map_flags)
    for name in maps:
        if name:
            refuse_unknown(f"--map {name}", f"workload of {card.id}", name, card.workloads)
    wanted_of = asked(card, metric_flags)
    flags = [which.rows_flag(word, card.workloads) for word in rows]
    real = [os.path.realpath(path) for *_, path in flags]
    twice = {path for *_, path in flags if real.count(os.path.realpath(path)) > 1}
    if twice:
        raise BadInput(f"--rows {min(twice)}", "is given twice", "a file compared with itself says nothing")
    files = tuple((arm, _labelled(read(path, wanted_of), workload)) for arm, workload, path in flags)
    arms, neither = which.split([(arm, i.samples) for arm, i in files], selectors)
    for where in maps.values():
        which.known_fields("--map", where, [*arms["control"], *arms["candidate"]])
    printed = {s.metric for arm in ARMS for s in arms[arm]} | {*METRICS}
    printed |= {metric for metric, source in which.DIFFERENCE.items() if source in printed}
    wanted: dict[tuple[str, str], bool] = {}
    for c in (c for _, gate in card.gates for _, c in gate.conditions()):
        keys = {(c.of, c.workload): c.compare != "value" and not c.against}
        keys |= {(c.than, c.workload): False} if c.than else {}
        keys |= {(c.of, c.against): False} if c.against else {}
        wanted |= {key: wanted.get(key, False) or paired for key, paired in keys.items() if key[0] in printed}
    arm_fields = [key for where in selectors.values() for key in where]
    matches = tuple(which.match(wanted, arms, maps, arm_fields))
    used = [m for m in matches if not m.reason]
    _refuse_another_setup(used, arm_fields)
    place = _place(used or [Match("", "", {}, tuple(arms["control"]), tuple(arms["candidate"]))], device)
    peaks = [p.base for p in devices.get(place).peaks.values()] if place in devices.ids() else []
    readings = {(m.metric, m.workload): _reading(m, arms, max(peaks, default=math.inf)) for m in used}
    counted = {(c.of, c.workload) for _, gate in card.gates for _, c in gate.conditions()} - wanted.keys()
    readings |= {key: found for key in counted if (found := _count(key[0], used, arms))}
    notes = [note for _, imported in files for note in imported.notes]
    notes += [f"{neither} figures belong to neither arm"] if neither else []
    notes += _warnings(card, used, arms, place)
    starts = [s.when for m in used for arm in ARMS for s in m.arm(arm) if _time(s)]
    notes += [text for text in [history.changed_since(card, starts)] if text]
    notes = list(dict.fromkeys(notes))
    judgement = verdicts.judgement(card, readings, "imported", place, None, note="; ".join(notes))
    known = printed | {metric for metric, _ in readings}
    return Outcome(_explained(judgement, matches, known), matches, files, tuple(notes), readings)


def keep(outcome: Outcome) -> Path:
    """Write the readings as records of the device, for the board; BadInput for a card of a family, whose rows are ours.

    Also where no GPU is named, or one that is none of data/devices.toml, and where no figure was read.
    """
    judged = outcome.judgement
    card = phases.card(judged.phase)
    if judged.device == UNKNOWN:
        raise BadInput("--keep", "the files name no GPU", "add --device")
    if card.family:
        raise BadInput("--keep", f"{card.id} is of family {card.family}", f"its rows are ours: lab measure {card.word}")
    device = devices.get(judged.device, "--device").id
    run, folder = store.new_run(device, card.id)
    made = structs.asdict(machine.provenance())
    made |= {"device": device, "phase": card.id, "run": run, "started": machine.now(), "gate_hash": card.gate_hash}
    names = tuple(dict.fromkeys(imported.path.name for _, imported in outcome.files))
    used = [s for m in outcome.matches if not m.reason for arm in ARMS for s in m.arm(arm)]
    made["made"] = ", ".join(filter(None, (_stated(used, keys) for keys in (HARDWARE, MODEL, BUILD))))
    kept = [
        Kept(**made, metric=metric, workload_id=workload, reading=reading, files=names, note=judged.note)
        for (metric, workload), reading in outcome.readings.items()
    ]
    if not kept:
        raise BadInput("--keep", "no figure of the gate was read", "see what the verdict says is missing")
    return store.append_all(folder, kept)


def asked(card: phases.Card, metric_flags: Sequence[str]) -> Asked:
    """What `--metric` says; raises BadInput for a metric that there is not."""
    units = {name: metric.unit for name, metric in card.gate.metrics.items()}
    how = _once("--metric", metric_flags)
    for name in how:
        refuse_unknown("--metric", "metric", name, units)
    return Asked(units, how)


def spreads(
    card: phases.Card, rows: Sequence[str], map_flags: Sequence[str], metric_flags: Sequence[str]
) -> Iterable[tuple[Condition, str, float, int]]:
    """(condition, workload, standard deviation in %, repetitions) of each required change, over the files given.

    Raises BadInput where they hold no repetitions of any.
    """
    flags, wanted_of = [which.rows_flag(word, card.workloads) for word in rows], asked(card, metric_flags)
    samples = [s for _, workload, path in flags for s in _labelled(read(path, wanted_of), workload).samples]
    changes = [c for _, gate in card.gates for c in gate.require if c.compare == "change" and not c.against]
    both, maps = dict.fromkeys(ARMS, samples), _once("--map", map_flags)
    matches = which.match({(c.of, c.workload): True for c in changes}, both, maps)
    by = {(m.metric, m.workload): m for m in matches}
    found = [
        (c, c.workload, sd_pct, len(m.values("control")))
        for c in changes
        if (m := by[c.of, c.workload]) and (sd_pct := _spread_pct(m.control, m.values("control")))
    ]
    if not found:
        reason = next((m.reason for m in matches if m.reason), "they have one repetition each")
        raise BadInput("lab plan --rows", f"no spread of what {card.id} asks ({reason})", "repeat the control's run")
    return found


def _labelled(imported: Imported, workload: str) -> Imported:
    """A file's figures, all of one workload where the user says so; raises BadInput where the file says otherwise."""
    for s in imported.samples if workload else ():
        if s.axes.get("workload", workload) != workload:
            raise BadInput(str(s.at), f"is of workload {s.axes['workload']}", f"give it without @{workload}")
    own = {"workload": workload} if workload else {}
    return replace(imported, samples=tuple(replace(s, axes={**s.axes, **own}) for s in imported.samples))


def _count(metric: str, used: Sequence[Match], arms: Mapping[str, Sequence[Sample]]) -> Reading | None:
    """What is counted over the files where none states it: finished runs, repetitions, operator tests."""
    paired = [m for m in used if m.paired]
    tests = [s.status for s in arms["candidate"] if s.status in ("passed", "incorrect")]
    runs = {s.id for m in paired for arm in ARMS for s in m.arm(arm)}
    counts = {
        "runs_complete": (bool(runs), "runs", len(runs)),
        "repetitions": (bool(runs), "reps", min((len(m.values(arm)) for m in paired for arm in ARMS), default=0)),
        "failures": (bool(tests), "cases", tests.count("incorrect")),
        "op_tests_passed": (bool(tests), "cases", tests.count("passed")),
    }
    there, unit, number = counts.get(metric, (False, "", 0))
    return Reading(unit, candidate=float(number)) if there else None


def _once(flag: str, words: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for word in words:
        name, where = which.selector(flag, word)
        if name in found:
            raise BadInput(f"{flag} {word}", f'"{name}" is given twice', "put its fields into one flag")
        found[name] = where
    return found


def _explained(judgement: verdicts.Judgement, matches: Iterable[Match], known: set[str]) -> verdicts.Judgement:
    """BLOCKED with the reason: why each workload without evidence has none, and what these tools never print."""
    if judgement.verdict.word != "BLOCKED":
        return judgement
    unmatched = {(m.metric, m.workload): m.reason for m in matches if m.reason}
    asked = [(f.condition.of, f.condition.workload) for f in judgement.verdict.decisive]
    reasons = list(dict.fromkeys(unmatched[key] for key in asked if key in unmatched))
    never = sorted({metric for metric, _ in asked} - known)
    if never:
        reasons.append(f"these tools do not print {', '.join(never)}")
    if all(key in unmatched or key[0] in never for key in asked):
        text = f"evidence incomplete: {'; '.join(reasons)}"
    else:  # something else is missing too (a unit, an arm), which the judge has said
        text = "; ".join([judgement.verdict.reason, *reasons])
    return replace(judgement, verdict=replace(judgement.verdict, reason=text))


def _stated(samples: Iterable[Sample], keys: Iterable[str]) -> str:
    """What figures say under some keys, "" when they say nothing: "RTX 4090", "8cf427ff 5163"."""
    words = [dict.fromkeys(str(v) for s in samples if (v := getattr(s.made, k)) != "") for k in keys]
    return " ".join(", ".join(word) for word in words if word)


def _refuse_another_setup(used: Iterable[Match], arm_fields: Sequence[str]) -> None:
    """arm_fields: what the user says tells the arms apart; of the NAMEABLE they may then differ in it."""
    for m in used:
        for key in (*HARDWARE, "compute_capability", "model_n_params", *NAMEABLE):
            one, other = (_setup(m.arm(arm), key) for arm in ARMS)
            nameable = key in NAMEABLE
            if one and other and one != other and not (nameable and key in arm_fields):
                what, remedy = f"{key} of the control is {one}, of the candidate {other}", "one machine and one model"
                remedy += f", or name {key} in --arm where it is the question" if nameable else ""
                raise BadInput("--rows", f"{m.title}: {what}", f"measure both arms with {remedy}")
        _refuse_another_load(m)


def _setup(samples: Sequence[Sample], key: str) -> str:
    """What an arm's figures say under a key, spelled so that what is alike is equal; "" where they do not say."""
    said = ", ".join(dict.fromkeys(s.fields.get(key, "") for s in samples))
    if key == "model_filename":  # a GGUF's says its quantisation too, which may be what is compared
        return "" if said.endswith(".gguf") else base_name(said)
    if key == "n_gpu_layers" and re.fullmatch(r"-?\d+", said):
        return said if 0 <= int(said) < ALL_LAYERS else "all"
    return said


def _refuse_another_load(m: Match) -> None:
    for what, most in LOADS.items():
        loads = sorted((s.load[what], s.id) for arm in ARMS for s in m.arm(arm) if what in s.load and not s.wrong)
        if loads and loads[-1][0] > (1 + most) * loads[0][0]:
            (least, one), (largest, other) = loads[0], loads[-1]
            said = f"{m.title}: {one} has {least:.6g} {what} and {other} {largest:.6g}"
            raise BadInput("--rows", said, "run both arms with one data set, --seed and output length (--ignore-eos)")


def _place(used: Sequence[Match], device: str | None) -> str:
    """The device's id where it is known here, else its name as the files give it."""
    named = _stated([s for m in used for arm in ARMS for s in m.arm(arm)], ("gpu_info",))
    given = devices.get(device, "--device").id if device else ""
    try:
        found = devices.get(named).id if named else ""
    except BadInput:
        found = named
    if given and found and given != found:
        raise BadInput(f"--device {device}", f"but the files say {named}", "leave --device out")
    return given or found or UNKNOWN


def _reading(m: Match, arms: Mapping[str, Sequence[Sample]], peak_flop_s: float) -> Reading:
    """One reading; figures of several units keep them all, so that the judge refuses them."""
    samples = [*m.control, *m.candidate]
    units = list(dict.fromkeys(vocabulary.unit(s.unit) for s in samples))
    control, candidate = m.values("control"), m.values("candidate")
    if m.control and all(s.kind == "ceiling" for s in samples):
        candidate = control  # what a part of the control's run can give at most
    wrong = next((s.wrong for s in samples if s.wrong), "")
    failed = [s for arm in ARMS for t in m.arm(arm)[:1] for s in _tests(t, arms[arm]) if s.status == "incorrect"]
    fast = [s for s in samples if s.flop_s > peak_flop_s]
    if fast:
        peak = f"the device's highest dense peak, {peak_flop_s / 1e12:.0f}"
        wrong = f"{fast[0].id} claims {fast[0].flop_s / 1e12:.0f} TFLOP/s, above {peak}"
    if failed:
        wrong = f"{failed[0].axes['op']} fails {failed[0].tool} ({failed[0].id})"
    before, after = (statistics.fmean(arm) if arm else None for arm in (control, candidate))
    reading = Reading(
        unit="" if "" in units else " and ".join(units),
        control=before,
        candidate=after,
        control_sd_pct=_spread_pct(m.control, control),
        repeats=min(len(control), len(candidate)) if control else len(candidate),
        ids=tuple(s.id for s in samples),
        impossible=wrong,
        arrival=arrival_of(_arrival(s) for s in samples),
        kind="ceiling" if any(s.kind == "ceiling" for s in samples) else "measured",
    )
    if len(units) != 1 or after is None:
        return reading
    error, its = (m.arm(arm)[0].error if len(m.values(arm)) == 1 else 0.0 for arm in ARMS)
    own = (after - NORMAL * its, after + NORMAL * its) if its else None
    if before is None:
        return replaced(reading, interval=own)
    changed, apart = interval.change_pct(control, candidate), None
    if before and error and its and (before, error) != (after, its):  # alike to the last digit: nothing was changed
        # Errors of two runs over the same tokens go together, so that their difference is known better than this says.
        reach, share = (NORMAL * math.hypot(*both) for both in ((error, its), (error / before, its / after)))
        apart = (after - before - reach, after - before + reach)
        low, here, high = (100 * (after / before * math.exp(end) - 1) for end in (-share, 0.0, share))
        changed = changed or (here, low, high)
    if samples[0].metric != m.metric:  # formed from both arms
        return replaced(reading, control=None, candidate=after - before, interval=apart)
    return replaced(reading, interval_pct=changed and changed[1:], interval=own, difference=apart)


def _spread_pct(samples: Sequence[Sample], values: Sequence[float]) -> float | None:
    """Standard deviation of an arm's figures in % of their mean: of its repetitions, else as its tool printed it."""
    mean = statistics.fmean(values) if values else 0.0
    spread = statistics.stdev(values) if len(values) > 1 else samples[0].error if values else 0.0
    return 100 * spread / mean if mean and (spread or len(values) > 1) else None


def _arrival(sample: Sample) -> str:
    """The arrivals that its tool cannot but produce, else those that the figure states, "" where neither says."""
    return ARRIVAL.get(sample.tool) or sample.fields.get("arrival", "")


def _tests(timed: Sample, arm: Iterable[Sample]) -> list[Sample]:
    """The correctness results of the very operator and parameters that were timed, on the same backend."""
    same = (timed.axes, timed.made.backend_name)
    return [s for s in arm if s.status in ("passed", "incorrect") and (s.axes, s.made.backend_name) == same]


def _time(sample: Sample) -> datetime | None:
    try:
        when = datetime.fromisoformat(sample.when)
    except ValueError:
        return None
    return when if when.tzinfo else None


def _warnings(
    card: phases.Card, used: Sequence[Match], arms: Mapping[str, Sequence[Sample]], place: str
) -> Iterable[str]:
    if not used:
        return
    if card.device and place != card.device:
        unnamed = f"the files name no GPU: if it was that one, say so with --device {card.device}"
        yield f"the card asks about {card.device}, {unnamed if place == UNKNOWN else f'these figures are from {place}'}"
    paired = [m for m in used if m.paired]
    sides = {arm: [s for m in paired for s in m.arm(arm)] for arm in ARMS}
    everything = sides["control"] + sides["candidate"]
    if not everything:
        return
    yield from _provenance(sides)
    before, after = ({k: v for s in sides[arm] for k, v in s.settings.items()} for arm in ARMS)
    changed = [k for k in before if after.get(k) != before[k]]
    if len(changed) > 1:
        listed = which.differing(everything, {k for s in everything for k in s.fields} - set(changed))
        yield f"the arms differ in {len(changed)} settings: {listed}"
    repeated: dict[str, list[str]] = {}
    for m in paired:
        counts = {arm: len(m.values(arm)) for arm in ARMS}
        if min(counts.values()) < FEW and not all(s.error for arm in ARMS for s in m.arm(arm)):
            one, other = (f"{n} {'repetition' if n == 1 else 'repetitions'}" for n in counts.values())
            few = f"{one} of the control and {other} of the candidate do not show how runs vary ({FEW} of each would)"
            floor = f"the card's noise floor of {card.gate.noise.floor_pct:g} %"
            floor += " or the control's spread" if counts["control"] > 1 else " alone"
            repeated.setdefault(f"{few}: the effect is held against {floor}", []).append(m.title)
        ran = {arm: {s.load["launches"] for s in m.arm(arm) if "launches" in s.load} for arm in ARMS}
        if ran["control"] != ran["candidate"]:
            pair = " and ".join(f"{', '.join(f'{n:g}' for n in sorted(of))} of the {arm}" for arm, of in ran.items())
            yield f"{m.title}: the times are of {pair} launches: that both did the same work is the user's word"
        if m.unchecked:
            yield f'{m.workload}: nothing in the files was compared with "{m.unchecked}"'
        if m.candidate[0].tool == backend_ops.TOOL:
            operator = m.candidate[0].axes
            yield f"{m.title} is taken to be {operator['op']}({operator['params']}) on the user's word"
            if not all(_tests(m.arm(arm)[0], arms[arm]) for arm in ARMS):
                yield f"{m.title}: these files hold no correctness test of that operator for both arms"
        for arm in ARMS:
            files = dict.fromkeys(s.at.path.name for s in m.arm(arm))
            if len(files) > 1:
                named = ", ".join([*files][:4]) + (", ..." if len(files) > 4 else "")
                yield f"{m.title}: {len(files)} files of the {arm} are pooled as repetitions ({named})"
    yield from (f"{', '.join(titles)}: {text}" for text, titles in repeated.items())
    if any(s.tool == backend_ops.TOOL for s in everything):
        yield "test-backend-ops times a repeated graph by the host's clock: warm L2, launch gaps included, a mean"
    times = {arm: [t for s in sides[arm] if (t := _time(s))] for arm in ARMS}
    if all(times.values()):
        orders = (ARMS, tuple(reversed(ARMS)))
        gap_s = max((min(times[late]) - max(times[early])).total_seconds() for early, late in orders)
        if gap_s > 0:
            apart = f"{gap_s / 60:.0f} min" if gap_s < 5400 else f"{gap_s / 3600:.1f} h"
            yield f"the arms ran one after the other ({apart} between them): a drift of the machine counts as effect"


def _provenance(sides: Mapping[str, Sequence[Sample]]) -> Iterable[str]:
    """Build, model and hardware of the arms where they differ, are absent, or nothing at all differs."""
    builds, models = ({arm: _stated(sides[arm], keys) for arm in ARMS} for keys in (BUILD, MODEL))
    hardware = {arm: _stated(sides[arm], HARDWARE) for arm in ARMS}
    absent = [
        word for word, found in (("build", builds), ("model", models), ("GPU", hardware)) if not all(found.values())
    ]
    tools = {s.tool for side in sides.values() for s in side}
    if tools == {backend_ops.TOOL} and "model" in absent:
        absent.remove("model")  # an operator test has none
    if absent:
        yield f"the files do not name the {' or '.join(absent)} of both arms: that it is the same is the user's word"
    if all(builds.values()) and builds["control"] != builds["candidate"]:
        pair = f"{builds['control']} against {builds['candidate']}"
        yield f"the arms are different builds ({pair}): every change between them is part of the effect"
    if all(models.values()) and models["control"] != models["candidate"]:
        yield f"the arms ran different model files ({models['control']} against {models['candidate']})"
    ignored = {"file", "test_time"}
    if builds["control"] and not which.differing([sides["control"][0], sides["candidate"][0]], ignored):
        yield "the arms differ in nothing that the files record: what was changed is the user's word"


def _mapping(m: Match) -> dict[str, Any]:
    def side(arm: str) -> dict[str, Any]:
        samples, values = m.arm(arm), m.values(arm)
        return {
            "figures": [s.id for s in samples],
            "unit": samples[0].unit if samples else None,
            "mean": statistics.fmean(values) if values else None,
            "repetitions": len(values),
            "made": samples[0].made.stated() if samples else {},
            "settings": dict(samples[0].settings) if samples else {},
        }

    shape = dict(m.candidate[0].axes) if m.candidate else {}
    asked = {"workload": m.workload, "metric": m.metric, "where": dict(m.where), "reason": m.reason, "shape": shape}
    return {**asked, **{arm: side(arm) for arm in ARMS}}


def render(outcome: Outcome) -> str:
    """The verdict, every condition, the mapping and the warnings, for a terminal."""
    j = outcome.judgement
    lines = [f"{j.phase} on imported evidence, {j.device}: {j.verdict.word}. {j.verdict.reason}."]
    lines += [f"claim {name}: {v.word}. {v.reason}." for name, v in j.claims]
    lines += [f"  {f.role}: {f}" for f in j.verdict.findings]
    cells = []
    for m in outcome.matches:
        shown = [_shown(m, arm) for arm in ARMS] if not m.reason else ["-", "-"]
        ids = [[s.id for s in m.arm(arm)] for arm in ARMS]
        listed = [", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "") for own in ids]
        source = m.reason or "; ".join(filter(None, listed))
        cells.append((m.workload or "(phase)", m.metric, m.asked, *shown, source))
    if cells:
        header = ("workload", "metric", "is", "control", "candidate", "from")
        lines += ["", console.table(header, cells, (20, 12, 24, 24, 24, 40))]
    if outcome.notes:
        lines += ["", *(f"note: {note}" for note in outcome.notes)]
    return "\n".join(lines)


def _shown(m: Match, arm: str) -> str:
    values = m.values(arm)
    if not values:
        return "-"
    spread = f" sd {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.6g} {m.arm(arm)[0].unit or 'no unit'}{spread}, n {len(values)}"


def run(arguments: argparse.Namespace) -> Outcome:
    """The verdict that `lab judge CARD --rows ...` asks for; a card by its id, or by the path of one's own."""
    if arguments.all or len(arguments.phase) != 1:
        raise BadInput("lab judge --rows", "needs exactly one card", "see `lab phases`, or give a card's .toml file")
    how = arguments.arm, arguments.map, arguments.device, arguments.metric
    return judge(phases.card(*arguments.phase), arguments.rows, *how)
