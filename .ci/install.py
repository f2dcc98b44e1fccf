"""Make .venv what a lock says, once: `python3 .ci/install.py [EXTRA ...]`, called by every target of the Makefile.

What it decides and why:
- Ranges stand in pyproject.toml; the releases that `make` takes stand in .ci/cpu.lock and .ci/cuda.lock, so that the
  same commit gives the same environment next year. A lock is handed to pip as constraints: it says which release, not
  from where, so it names no index, and a torch with a local version (2.13.0+cpu) is the release that it is a build of.
  It holds no hashes: a release has other files, with other hashes, on each platform and index, and pip checks none
  where one requirement, this checkout, has none. LOCK= (empty) goes by the ranges, LOCK=FILE by a lock of one's own.
- `install.py lock` resolves the ranges anew and writes both locks: for this interpreter without a GPU, and for the
  machine that the committed rows were measured on with one.
- With an NVIDIA GPU (nvidia-smi lists one) it installs the `cuda` extra by cuda.lock.
- Without one it installs the `cpu` extra by cpu.lock. A registry may offer only the CUDA build of torch, which brings
  gigabytes of NVIDIA libraries that such a machine cannot use, so pip is first asked what it would take (`--dry-run`).
- A stamp in .venv holds a hash of everything the result depends on: the contents of pyproject.toml, of the lock and of
  this file, the variables, the interpreter, the GPU or its absence, and where the checkout lies (an editable install
  points there). Contents, not times, because `git checkout` touches files. The stamp is written last, so an interrupted
  installation is continued by the next call.

It runs before there is an environment: standard library only, and old syntax, so that an old Python gets a sentence
and no SyntaxError. Every refusal is one line on stderr with exit status 2.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "killgate-stamp")
# Older releases lack or lose parts of `--dry-run --report` and of `--use-feature=fast-deps`, which is experimental and
# may go in a later major.
PIP = "pip>=25,<27"
VARIABLES = ("TORCH_INDEX", "ALLOW_CUDA_TORCH", "LOCK")
# Where the committed rows were measured; no GPU is needed to resolve for it.
MEASURED = ("torch==2.11.0", "triton==3.6.0")
MEASURED_PYTHON = "3.12"


def refuse(line):
    """End with status 2 and one line."""
    sys.stderr.write(f"killgate: {' '.join(line.split())}\n")
    sys.exit(2)


def check_interpreter():
    """Refuse a Python that is too old, or one without venv or ensurepip (Debian packages them apart)."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info < (3, 11):
        refuse(
            f"Python {version} at {sys.executable} is older than 3.11; install a newer one (Debian 12, Ubuntu 24.04: "
            "apt install python3 python3-venv) and name it: make PYTHON=python3.12 ..."
        )
    try:
        import ensurepip  # noqa: F401  only asked whether it is there
        import venv  # noqa: F401
    except ImportError as error:
        refuse(f"Python {version} has no module {error.name}; apt install python{version}-venv brings it")


def has_gpu():
    """True when nvidia-smi runs and lists a GPU; the driver's library alone would not say that one is usable."""
    if not shutil.which("nvidia-smi"):
        return False
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def allows_cuda():
    """True when a CUDA build of torch may be installed without a GPU."""
    return os.environ.get("ALLOW_CUDA_TORCH", "") not in ("", "0")


def lock_file(gpu):
    """The path of the lock, "" to go by the ranges of pyproject.toml.

    A CUDA build of torch without a GPU is whatever an index offers, and fits neither lock.
    """
    chosen = os.environ.get("LOCK", "auto")
    if chosen == "auto":
        chosen = "" if allows_cuda() and not gpu else os.path.join(".ci", "cuda.lock" if gpu else "cpu.lock")
    if chosen and not os.path.exists(os.path.join(ROOT, chosen)):
        refuse(f"LOCK={chosen}: no such file; give a lock, or LOCK= to go by the ranges of pyproject.toml")
    return chosen and os.path.join(ROOT, chosen)


def key(gpu):
    """The hash of everything the installed environment depends on."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", os.path.join(".ci", "install.py"), lock_file(gpu)):
        if not name:
            continue
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    chosen = {name: os.environ.get(name, "") for name in VARIABLES}
    digest.update(repr((ROOT, sorted(chosen.items()), sys.version_info[:3], gpu)).encode())
    return digest.hexdigest()


def read_stamp():
    """The key of the last complete installation, or "" when there is none."""
    try:
        with open(STAMP) as file:
            return file.read().strip() if os.access(VENV_PYTHON, os.X_OK) else ""
    except OSError:
        return ""


def pip(*arguments):
    """Run the environment's pip in view of the user; end with its status when it fails."""
    status = subprocess.call([VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments], cwd=ROOT)
    if status:
        by_lock = "--constraint" in arguments
        refuse(
            f"pip {arguments[0]} failed with status {status}; its message stands above"
            + (f"; where this index lacks what {shown_lock(arguments)} names, LOCK= goes by ranges" if by_lock else "")
        )


def shown_lock(arguments):
    """The lock among pip's arguments, as it is called from the checkout."""
    return os.path.relpath(arguments[arguments.index("--constraint") + 1], ROOT)


def make_venv(constraint):
    """Create .venv, or make it anew when another minor version of Python made it or its Python does not run."""
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]}"
    code = "import sys, pip; print(sys.version_info[0], sys.version_info[1], sep='.')"
    try:
        found = subprocess.run([VENV_PYTHON, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    if found != wanted:
        command = [sys.executable, "-m", "venv", "--clear", VENV]
        status = subprocess.call(command)
        if status:
            refuse(f"{' '.join(command)} failed with status {status}; its message stands above")
    pip("install", "-qq", *constraint, PIP)


def requirements(*extras):
    """The requirements of pyproject.toml in extras, of which "" is what is always needed."""
    import tomllib  # not at the top: Python 3.11 is only known to be there once check_interpreter has run

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    every = {"": project["dependencies"], **project["optional-dependencies"]}
    return [line for extra in extras for line in every[extra]]


def torch_requirement(extra):
    """The requirement on torch in an extra of pyproject.toml, or the general one for ""."""
    return next(line for line in requirements(extra) if line.startswith("torch"))


def would_install(*arguments):
    """What pip would install, name -> version; ends with one line when it finds nothing.

    A dry run alone is not cheap: where a registry serves no separate metadata, pip downloads each wheel to read it.
    `fast-deps` makes it read the end of the file by a range request. Only a registry that offers neither costs more.
    """
    command = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--dry-run"]
    command += ["--use-feature=fast-deps", "--report", "-", *arguments]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if answer.returncode:
        wanted = next(word for word in reversed(arguments) if "torch" in word)
        remedy = " or make it go by ranges with LOCK=" if "--constraint" in arguments else ""
        refuse(f"pip finds no {wanted} (status {answer.returncode}; its message stands above); name an index{remedy}")
    return {p["metadata"]["name"]: p["metadata"]["version"] for p in json.loads(answer.stdout)["install"]}


def lock():
    """Resolve the ranges and write both locks; what has a local version (+cpu) is locked without it."""
    if not os.path.exists(VENV_PYTHON):
        make_venv([])
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    glibc = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    there = ["--python-version", MEASURED_PYTHON, "--only-binary", ":all:", "--target", os.path.join(VENV, "unused")]
    there += [word for tag in (*glibc, "any") for word in ("--platform", tag)]
    for kind, how, pinned, python in (
        ("cpu", index, (), f"{sys.version_info[0]}.{sys.version_info[1]}"),
        ("cuda", there, MEASURED, MEASURED_PYTHON),
    ):
        asked = [*pinned, *requirements("", kind, "notebooks", "test", "browser", "pdf", "cluster")]
        found = would_install("--ignore-installed", *how, PIP, *asked)
        releases = sorted({f"{re.sub('[-_.]+', '-', name).lower()}=={v.split('+')[0]}" for name, v in found.items()})
        head = f"# The releases that `make` installs, resolved for Python {python} on Linux x86-64 by `make lock`."
        with open(os.path.join(ROOT, ".ci", f"{kind}.lock"), "w") as file:
            file.write("\n".join([head, *releases, ""]))
        print(f"killgate: .ci/{kind}.lock names {len(releases)} releases", flush=True)


def refuse_cuda_build(requirement, index):
    """Ask pip what it would install for torch, and refuse when NVIDIA's packages are in it."""
    chosen = would_install(*index, requirement)
    unwanted = sorted(name for name in chosen if name.lower().startswith(("nvidia", "cuda", "triton")))
    # Triton alone is wanted; beside NVIDIA's libraries it is one more download to name.
    if [name for name in unwanted if name != "triton"]:
        refuse(
            f"no NVIDIA GPU here, yet pip would take a CUDA build of torch {chosen.get('torch', '(installed)')}; set "
            "TORCH_INDEX=<the PyTorch project's CPU wheel index>, or ALLOW_CUDA_TORCH=1 to download it with "
            f"{len(unwanted)} more: {', '.join(unwanted)}"
        )


def main(further=()):
    """Install unless the stamp says that it is done; further: extras that are asked of pip each time."""
    check_interpreter()
    if list(further) == ["lock"]:
        return lock()
    gpu = has_gpu()
    constraint = ["--constraint", lock_file(gpu)] if lock_file(gpu) else []
    wanted = key(gpu)
    if read_stamp() != wanted:
        install(gpu, constraint)
        with open(STAMP, "w") as file:
            file.write(wanted + "\n")
    if further:
        pip("install", "-qq", *constraint, "--editable", f".[{','.join(further)}]")


def install(gpu, constraint):
    """Make .venv and let pip fill it."""
    make_venv(constraint)
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    # A CUDA build of torch pins its own Triton, which the pins of `cpu` would contradict: no extra for it.
    extra = "cuda" if gpu else "" if allows_cuda() else "cpu"
    requirement = torch_requirement("cpu" if extra == "cpu" else "")
    if extra == "cpu":
        refuse_cuda_build(requirement, [*constraint, *index])
    if index:
        pip("install", *constraint, *index, requirement)
    extras = ",".join(name for name in (extra, "notebooks", "test") if name)
    print(f"killgate: installing .[{extras}] into .venv, once; this takes a minute or two", flush=True)
    # -qq leaves pip's errors and drops its warnings, of which a mirror can cause one per package.
    pip("install", "-qq", *constraint, "--editable", f".[{extras}]")


if __name__ == "__main__":
    main(sys.argv[1:])
