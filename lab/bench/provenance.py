"""How a row was made: GPU, driver, versions, commit and an allow-list of the environment."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from typing import Any

from lab.base.errors import REPOSITORY

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


def provenance() -> dict[str, Any]:
    """How a row was made: GPU (name, and an id of the card), driver, versions, commit, and some of the environment."""
    import torch

    head, dirty = commit()
    facts: dict[str, Any] = {
        "commit": head,
        "dirty": dirty,
        "stated_commit": os.environ.get("KILLGATE_COMMIT", ""),  # of a copy whose own git is behind or absent
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "environment": {key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
    }
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size}
        facts["driver"] = smi("driver_version")
        facts["gpu_id"] = same_card(smi("uuid"))
    return facts


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
