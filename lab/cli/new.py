"""`lab new card NAME`, `lab new family NAME`, `lab new device`: a first file, or folder, that works at once."""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from lab.base import devices, files, own
from lab.base.errors import REPOSITORY, BadInput, shown
from lab.card import phases

TEMPLATES = REPOSITORY / "data" / "new"
WORD = "newfamily"  # in the templates, for the family's name
PROSE = {"FAMILY": "", "CONTROL": "the parent commit", "CANDIDATE": "the change", "WORKLOAD": "tg128"}
PROSE |= {"METRIC": "decode_tps", "SIGN": ">", "THRESHOLD": "5"}


def run(arguments: Namespace) -> int:
    """Write it; nothing is left where it fails, and nothing that is there is touched."""
    name = arguments.name or ""
    if arguments.family and arguments.what != "card":
        raise BadInput("--family", f"says nothing of a {arguments.what}", "leave it out")
    if bool(name) == (arguments.what == "device"):
        raise BadInput(f"lab new {arguments.what}", f'name "{name}"', "devices are named by their GPU, others by you")
    if arguments.what == "device":
        from lab.bench import measure

        device = measure.require_gpu("lab new device")
        if device.id in devices.ids():
            raise BadInput("lab new device", f"{device.name} is listed, as {device.id}", "nothing is needed")
        made, then = measure.remember(device), "add its peaks, each with a source; lab measure --ceilings"
    elif arguments.what == "family":
        made = _family(name)
        then = f"lab check {name}"
    else:
        made = _card(name, arguments.family)
        then = f"lab judge {shown(made)}"
    print(f"written: {shown(made)}\nnext: {then}")
    return 0


def _card(name: str, family: str | None) -> Path:
    """A card in the card directory, or here; of a family its first two kernels and its last real shape."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith(".toml"):
        raise BadInput("lab new card", f'"{name}" is no name', "take letters, digits, - and _")
    if (known := phases.cards().get(name)) and not known.own:
        raise BadInput("lab new card", f'"{name}" is a card already', "take another name: rows are kept by it")
    said = {"NAME": name, **PROSE, **(_arms(family) if family else {})}
    text = (TEMPLATES / "card.toml").read_text(encoding="utf-8")
    text = re.sub(rf"\b({'|'.join(said)})\b", lambda found: said[found[0]], text)
    return files.write(_free((own.folder() or Path()) / f"{name}.toml"), text)


def _arms(family_name: str) -> Mapping[str, str]:
    from lab.check import families

    families.interpret_on_cpu()
    family = families.load(family_name)
    ours = [name for name in family.candidates if name not in family.peers]
    theirs = [name for name in family.peers if name not in ours] or ours[1:]
    shape = [w for w in family.cases.WORKLOADS if w.role == "measure" and not family.candidates[ours[0]].refuses(w)]
    if not theirs or not shape:
        raise BadInput("--family", f"{family_name} has no two kernels for one real shape", "write one first")
    said = {"FAMILY": f'family = "{family_name}"', "CONTROL": theirs[0], "CANDIDATE": ours[0], "WORKLOAD": shape[-1].id}
    return {**said, "METRIC": "kernel_us", "SIGN": "<", "THRESHOLD": "-5"}


def _family(name: str) -> Path:
    from lab.check import families

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise BadInput("lab new family", f'"{name}" is no name of a Python module', "take a-z, digits and _")
    places = families.FOLDER / name, REPOSITORY / "tests" / "kernels" / name
    for place in (*places, families.FOLDER / f"{name}.py"):
        _free(place)
    try:
        with tempfile.TemporaryDirectory(prefix=".new", dir=families.FOLDER) as folder:
            staged = Path(folder) / "family", Path(folder) / "tests"
            for place in staged:
                place.mkdir()
            for path in sorted((TEMPLATES / "family").iterdir()):
                into = staged[path.name.startswith("test_")] / path.name.replace(WORD, name)
                into.write_text(path.read_text(encoding="utf-8").replace(WORD, name), encoding="utf-8")
            for source, place in zip(staged, places, strict=True):
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, place)
    except OSError as error:
        shutil.rmtree(places[0], ignore_errors=True)  # ours: it was not there
        raise BadInput(places[0], f"not written ({error.strerror})", "free space or fix permissions") from None
    return places[0]


def _free(path: Path) -> Path:
    if path.exists():
        raise BadInput(path, "is there already", "take another name")
    return path
