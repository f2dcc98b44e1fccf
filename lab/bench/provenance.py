"""How a row was made: GPU, driver, versions, commit and an allow-list of the environment."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess

from msgspec import structs

from lab.base.errors import REPOSITORY
from lab.row.records import Provenance

ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "TRITON_INTERPRET", "PYTORCH_CUDA_ALLOC_CONF")


def commit() -> tuple[str, bool | None]:
    """The checked-out commit's short hash and whether tracked files differ from it; ("unknown", None) without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head, bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KILLGATE_COMMIT", "unknown"), None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def provenance() -> Provenance:
    """How a row is made here: GPU (name, and an id of the card), driver, versions, commit, some of the environment."""
    import torch

    head, dirty = commit()
    there = importlib.util.find_spec("triton") is not None
    facts = Provenance(
        commit=head,
        dirty=dirty,
        stated_commit=os.environ.get("KILLGATE_COMMIT", ""),  # of a copy whose own git is behind or absent
        python=platform.python_version(),
        torch=str(torch.__version__),  # a subclass of str, which is no JSON to msgspec
        cuda=torch.version.cuda,
        triton=importlib.import_module("triton").__version__ if there else None,
        environment={key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
    )
    if not torch.cuda.is_available():
        return facts
    card = torch.cuda.get_device_properties(0)
    return structs.replace(
        facts,
        gpu=card.name,
        gpu_id=same_card(smi("uuid")),
        sms=card.multi_processor_count,
        l2_bytes=card.L2_cache_size,
        driver=smi("driver_version"),
    )


def same_card(uuid: str | None) -> str | None:
    """Eight digits that are equal for rows of one physical GPU and say nothing else about it; None without a uuid."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:8] if uuid else None


def smi(*fields: str) -> str | None:
    """Fields of nvidia-smi's query for GPU 0 as one comma-separated line, None where it is absent."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
