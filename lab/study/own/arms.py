"""Which figures are the control, which the candidate, and which of the card's workloads they belong to.

Two files are two arms (`--rows control=A --rows candidate=B`); one file holds both when a field tells them apart
(`--rows FILE --arm control:flash_attn=0 --arm candidate:flash_attn=1`). A card's workload says its axes in its name
(npl32, npp512, ntg128, depth4096, ctx2048, or a llama-bench test such as tg128 or pp512@d4096);
`--map WORKLOAD:FIELD=VALUE,...` adds what the name does not say. Values may hold * and ?. A file of one workload may
say so where it is given (`--rows control@npl32=FILE`), or in a column `workload`: it then stands for no other one.

A workload takes figures of one shape and one configuration per arm, and the same shape in both. Where several remain,
nothing is averaged and none is picked: the workload stays without evidence, and the reason names the fields that
differ, which is what `--map` has to say.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.base.errors import BadInput, nearest, refuse_unknown
from lab.study.own.sample import Sample

ARMS = ("control", "candidate")
Where = Mapping[str, str]
FIELD = re.compile(r",(?=[A-Za-z_]\w*=)")
DECLARED = re.compile(r"(?<![A-Za-z0-9])(npl|npp|ntg|depth|ctx)(\d+)(?![A-Za-z0-9])")
AXES = {"npl", "npp", "ntg", "depth", "ctx", "test"}
TEST = re.compile(r"(?:pp|tg)\d+(?:@d\d+)?")
WITHIN_ONE_ARM = ("file",)  # repetitions of one configuration may come from several files
DIFFERENCE = {"kl_delta": "kl"}  # what may be formed from both arms' figures of another metric


@dataclass(frozen=True)
class Match:
    """What stands for one (metric, workload) of the card. reason: why there is no evidence, "" where there is.

    where: the fields asked for; of the workload's name only `unchecked` words were not compared with anything.
    paired: whether the control is needed too; a count is asked of the candidate alone.
    """

    metric: str
    workload: str
    where: Where
    control: tuple[Sample, ...] = ()
    candidate: tuple[Sample, ...] = ()
    reason: str = ""
    unchecked: str = ""
    paired: bool = True

    @property
    def title(self) -> str:
        """The workload, or the metric of a whole phase."""
        return self.workload or self.metric

    @property
    def asked(self) -> str:
        """The fields asked for in words."""
        return ", ".join(f"{k}={v}" for k, v in self.where.items()) or "anything"

    def arm(self, name: str) -> tuple[Sample, ...]:
        """The figures of one arm."""
        return self.control if name == "control" else self.candidate

    def values(self, name: str) -> list[float]:
        """Every repetition of one arm."""
        return [v for s in self.arm(name) for v in s.values]

    def without(self, reason: str) -> Match:
        """The same question with no evidence."""
        return replace(self, control=(), candidate=(), reason=reason)


def rows_flag(word: str, workloads: Iterable[str] = ()) -> tuple[str, str, Path]:
    """`control=FILE`, `candidate@WORKLOAD=FILE` or `FILE` -> (arm or "", workload or "", file); raises BadInput."""
    name, separator, rest = word.partition("=")
    arm, at, workload = name.partition("@")
    if separator and arm in ARMS:
        if at:
            refuse_unknown(f"--rows {word}", "workload of the card", workload, workloads)
        return arm, workload, Path(rest)
    if separator and not Path(word).exists() and re.fullmatch(r"[A-Za-z]+", arm):
        raise BadInput(f"--rows {word}", f'"{arm}" is no arm', nearest(arm, ARMS))
    return "", "", Path(word)


def selector(flag: str, word: str) -> tuple[str, dict[str, str]]:
    """`NAME:FIELD=VALUE,FIELD=VALUE` -> (NAME, {FIELD: VALUE}); a comma inside a value is kept."""
    name, separator, rest = word.partition(":")
    pairs = dict(part.split("=", 1) for part in FIELD.split(rest) if "=" in part)
    if not separator or not pairs or not all(key.isidentifier() for key in pairs):
        raise BadInput(f"{flag} {word}", "is not NAME:FIELD=VALUE", f"write it like {flag} {EXAMPLES[flag]}")
    return name, pairs


EXAMPLES = {"--arm": "control:flash_attn=0", "--map": "WORKLOAD:npl=32,npp=128"}
EXAMPLES["--metric"] = "gdn_us_per_token:category=gdn_recurrence,tokens=2048"


def agrees(sample: Sample, where: Where) -> bool:
    """Whether a figure has every field asked for: equal as numbers, or as text with * and ?."""
    fields = sample.fields
    return all(key in fields and _same(fields[key], value) for key, value in where.items())


def _same(have: str, want: str) -> bool:
    try:
        return float(have) == float(want)
    except ValueError:
        # A bracket is part of a parameter (ne=[8,1,1,1]) and no character class.
        return fnmatch.fnmatchcase(have, want.replace("[", "[[]"))


def _stands_for(sample: Sample, m: Match) -> bool:
    """Whether a figure is one of a match's workload: by its own label, else by the fields asked for."""
    label = sample.axes.get("workload")
    if label is None:
        return bool(m.where or not m.workload) and agrees(sample, m.where)
    have = sample.fields
    return label == m.workload and agrees(sample, {key: value for key, value in m.where.items() if key in have})


def known_fields(flag: str, where: Where, samples: Iterable[Sample]) -> None:
    """Raise BadInput for a field that no figure has."""
    known = {key for sample in samples for key in sample.fields}
    for key in where:
        refuse_unknown(flag, "field of a figure", key, known)


def split(
    labelled: Sequence[tuple[str, Sequence[Sample]]], selectors: Mapping[str, Where]
) -> tuple[dict[str, list[Sample]], int]:
    """(arm -> figures, how many belong to neither); raises BadInput when it is not clear which is which.

    labelled:  for each file, its arm ("" when the file was given without one) and its figures.
    selectors: arm -> fields, from `--arm`; needed for files without an arm.
    """
    for arm, where in selectors.items():
        refuse_unknown("--arm", "arm", arm, ARMS)
        known_fields("--arm", where, [s for _, samples in labelled for s in samples])
    arms: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
    neither = 0
    for given, samples in labelled:
        if not given and not selectors:
            name, axes = samples[0].at.path.name, {key for s in samples for key in s.axes}
            varying = differing(samples, axes) or differing(samples, ("params",))
            hint = f"; {name} varies in {varying}" if varying else ""
            remedy = "give --rows control=FILE --rows candidate=FILE, or --arm control:FIELD=VALUE for one file of both"
            raise BadInput(f"--rows {name}", f"is of no arm{hint}", remedy)
        for sample in samples:
            names = [given] if given else [arm for arm, where in selectors.items() if agrees(sample, where)]
            if len(names) > 1:
                raise BadInput("--arm", f"{sample.id} is both control and candidate", "name a field that differs")
            neither += not names
            for name in names:
                arms[name].append(sample)
    for arm in (arm for arm in ARMS if not arms[arm]):
        where, every = selectors.get(arm, {}), [s.fields for _, samples in labelled for s in samples]
        asked = ", ".join(f"{k}={v}" for k, v in where.items()) or "no file"
        have = [f"{k} {', '.join(sorted({f[k] for f in every if k in f})[:6])}" for k in where]
        remedy = f"the files have {'; '.join(have)}" if have else f"give --rows {arm}=FILE or --arm {arm}:FIELD=VALUE"
        raise BadInput("lab judge --rows", f"nothing is the {arm} ({asked})", remedy)
    return arms, neither


def differing(samples: Sequence[Sample], ignore: Iterable[str] = ()) -> str:
    """The fields in which figures differ, with their values, in one phrase: "n_ubatch (512, 1024)"."""
    keys = dict.fromkeys(key for sample in samples for key in sample.fields)
    phrases = []
    for key in keys:
        values = sorted({s.fields.get(key, "not stated") for s in samples})
        if len(values) > 1 and key not in ignore:
            more = ", ..." if len(values) > 4 else ""
            phrases.append(f"{key} ({', '.join(values[:4])}{more})")
    return ", ".join(phrases)


def declared(workload: str) -> tuple[dict[str, str], str]:
    """(the axes that a workload's name declares, the words of it that declare nothing)."""
    if TEST.fullmatch(workload):
        return {"test": workload}, ""
    axes = {found[1]: found[2] for found in DECLARED.finditer(workload)}
    words = [word for word in re.split(r"[^A-Za-z0-9]+", DECLARED.sub(" ", workload)) if word]
    return axes, " ".join(words)


def match(
    wanted: Mapping[tuple[str, str], bool],
    arms: Mapping[str, Sequence[Sample]],
    maps: Mapping[str, Where],
    arm_fields: Iterable[str] = (),
) -> list[Match]:
    """For each (metric, workload) of the card and whether it needs the control, the figures, or why there are none.

    Raises BadInput where the arms were timed by two tools.

    maps:       workload -> fields, from `--map`; added to, and stronger than, what the name declares.
    arm_fields: fields that tell the arms apart, in which the shapes may therefore differ.
    """
    asked = []
    for (metric, workload), paired in wanted.items():
        axes, words = declared(workload)
        given = maps.get(workload, {})
        # A further axis (npp=128) says nothing about the name's other words; a model, a file or an operator may.
        asked.append(
            Match(metric, workload, {**axes, **given}, unchecked="" if given.keys() - AXES else words, paired=paired)
        )
    found = [_evidence(m, asked, arms, tuple(arm_fields)) for m in asked]
    return [_alone(m, found) for m in found]


def _alone(m: Match, found: Iterable[Match]) -> Match:
    own = {id(s) for s in (*m.control, *m.candidate)}
    for other in found:
        shared = [s for s in (*other.control, *other.candidate) if id(s) in own]
        if shared and m.workload and other.workload and other.workload != m.workload:
            names = " and ".join(sorted([m.workload, other.workload]))
            return m.without(f"{names} both match {shared[0].id}: tell them apart with --map")
    return m


def _evidence(
    m: Match, asked: Sequence[Match], arms: Mapping[str, Sequence[Sample]], arm_fields: Iterable[str]
) -> Match:
    """The match with the figures of both arms, or with the reason why there are none."""
    name = m.workload or "the whole phase"
    printed = {s.metric for arm in ARMS for s in arms[arm]}
    source = m.metric if m.metric in printed else DIFFERENCE.get(m.metric, m.metric)
    labelled = any(s.axes.get("workload") == m.workload for arm in ARMS for s in arms[arm] if s.metric == source)
    m = replace(m, paired=m.paired or source != m.metric, unchecked="" if labelled else m.unchecked)
    remedy = f"say which figures they are with --map {m.workload}:FIELD=VALUE"
    if m.workload and not m.where and not labelled:
        return m.without(f"{name} declares no axis (npl, npp, ntg, depth, ctx or a test name): {remedy}")
    twins = [o.workload for o in asked if (o.metric, o.where) == (m.metric, m.where) and o.workload != m.workload]
    if m.where and twins and not labelled:
        names = sorted([name, *twins])
        how = f"tell them apart with --map {names[0]}:FIELD=VALUE"
        return m.without(f"{' and '.join(names)} ask for the same, {m.asked}: {how}")
    chosen: dict[str, tuple[Sample, ...]] = {}
    for arm in ARMS:
        relevant = [s for s in arms[arm] if s.metric == source and _stands_for(s, m)]
        found = [s for s in relevant if s.status == "ok"]
        if not found and any(s.kind == "ceiling" for s in chosen.get("control", ())):
            found = [*chosen["control"]]  # of what the control's run leaves to gain
        if not found and (m.paired or arm == "candidate"):
            refused = next((f": {s.id} says unsupported" for s in relevant if s.status == "unsupported"), "")
            return m.without(f"{arm} has no {m.metric} for {name} ({m.asked}){refused}")
        if differ := differing(found, WITHIN_ONE_ARM):
            return m.without(f"{arm} has several figures for {name} ({m.asked}) that differ in {differ}: {remedy}")
        chosen[arm] = tuple(found)
    if not chosen["control"]:
        return replace(m, candidate=chosen["candidate"])
    one, other = (found[0] for found in chosen.values())
    if one.tool != other.tool:
        what = f"{name}: the control is from {one.tool}, the candidate from {other.tool}"
        raise BadInput("--rows", what, "time both arms with one tool")
    # The spelled-out parameter list is left out: its parts are there by name.
    axes = sorted({*one.axes, *other.axes} - {"params", *arm_fields})
    pairs = {k: [str(s.axes.get(k, "")) or "not stated" for s in (one, other)] for k in axes}
    if apart := [f"{k} ({a} against {b})" for k, (a, b) in pairs.items() if a != b]:
        return m.without(f"the arms have different shapes for {name}: {', '.join(apart)}")
    return replace(m, control=chosen["control"], candidate=chosen["candidate"])
