"""Make .venv what pyproject.toml asks for, once: `python3 .ci/install.py`, called by every target of the Makefile.

What it decides and why:
- With an NVIDIA GPU (nvidia-smi lists one) it installs the `cuda` extra and whatever CUDA build of torch pip finds.
- Without one it installs the `cpu` extra. A registry may offer only the CUDA build of torch, which brings gigabytes
  of NVIDIA libraries that such a machine cannot use, so pip is first asked what it would take (`--dry-run`).
- A stamp in .venv holds a hash of everything the result depends on: the contents of pyproject.toml and of this file,
  the variables, the interpreter, the GPU or its absence, and where the checkout lies (an editable install points
  there). Contents, not times, because `git checkout` touches files. The stamp is written last, so an interrupted
  installation is continued by the next call.

It runs before there is an environment: standard library only, and old syntax, so that an old Python gets a sentence
and no SyntaxError. Every refusal is one line on stderr with exit status 2.
"""

import hashlib
import json
import os
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
VARIABLES = ("TORCH_INDEX", "ALLOW_CUDA_TORCH")


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


def key(gpu):
    """The hash of everything the installed environment depends on."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", os.path.join(".ci", "install.py")):
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
        refuse(f"pip {arguments[0]} failed with status {status}; its message stands above")


def make_venv():
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
    pip("install", "-qq", PIP)


def torch_requirement(extra):
    """The requirement on torch in an extra of pyproject.toml, or the general one for ""."""
    import tomllib  # not at the top: Python 3.11 is only known to be there once check_interpreter has run

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return next(line for line in lines if line.startswith("torch"))


def refuse_cuda_build(requirement, index):
    """Ask pip what it would install for torch, and refuse when NVIDIA's packages are in it.

    A dry run alone is not cheap: where a registry serves no separate metadata, pip downloads each wheel to read it.
    `fast-deps` makes it read the end of the file by a range request. Only a registry that offers neither costs more.
    """
    command = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--dry-run"]
    command += ["--use-feature=fast-deps", "--report", "-", *index, requirement]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if answer.returncode:
        refuse(f"pip finds no {requirement} (status {answer.returncode}; its message stands above)")
    chosen = {p["metadata"]["name"]: p["metadata"]["version"] for p in json.loads(answer.stdout)["install"]}
    unwanted = sorted(name for name in chosen if name.lower().startswith(("nvidia", "cuda", "triton")))
    # Triton alone is wanted; beside NVIDIA's libraries it is one more download to name.
    if [name for name in unwanted if name != "triton"]:
        refuse(
            f"no NVIDIA GPU here, yet pip would take a CUDA build of torch {chosen.get('torch', '(installed)')}; set "
            "TORCH_INDEX=<the PyTorch project's CPU wheel index>, or ALLOW_CUDA_TORCH=1 to download it with "
            f"{len(unwanted)} more: {', '.join(unwanted)}"
        )


def main():
    """Install unless the stamp says that it is done."""
    check_interpreter()
    gpu = has_gpu()
    wanted = key(gpu)
    if read_stamp() == wanted:
        return
    make_venv()
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    # A CUDA build of torch pins its own Triton, which the pins of `cpu` would contradict: no extra for it.
    allowed = os.environ.get("ALLOW_CUDA_TORCH", "") not in ("", "0")
    extra = "cuda" if gpu else "" if allowed else "cpu"
    requirement = torch_requirement("cpu" if extra == "cpu" else "")
    if extra == "cpu":
        refuse_cuda_build(requirement, index)
    if index:
        pip("install", *index, requirement)
    extras = ",".join(name for name in (extra, "notebooks", "test") if name)
    print(f"killgate: installing .[{extras}] into .venv, once; this takes a minute or two", flush=True)
    # -qq leaves pip's errors and drops its warnings, of which a mirror can cause one per package.
    pip("install", "-qq", "--editable", f".[{extras}]")
    with open(STAMP, "w") as file:
        file.write(wanted + "\n")


if __name__ == "__main__":
    main()
