"""The tiny model's weights: bf16, in a numpy archive as uint16 bits; float32 where the step has float32.

Two trainings are kept, since a lever is felt only by what recalls through it: WEIGHTS recalls by its attention layer,
RECURRENT by its states.
"""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from kernels.common import Tensors
from kernels.step.model import Model
from kernels.step.tiny import corpus

_VOCAB = len(corpus.VOCAB)
# tiny learns on a CPU in 20 minutes; small is for a GPU, and stays below 8 MB too. Every K is a multiple of 64, a block
# of ggml's NVFP4, and heads are of 32 or more, a block of Q8_0.
MODELS = {
    "tiny": Model(4, 128, 256, 4, 2, 32, 2, 4, 32, _VOCAB, rotary=16, theta=1e4),
    "small": Model(8, 192, 384, 6, 2, 64, 2, 4, 64, _VOCAB, rotary=16, theta=1e4),
}
WEIGHTS = Path(__file__).with_name("weights.npz")
RECURRENT = Path(__file__).with_name("recurrent.npz")


def place_of(path: Path) -> Path:
    """Where weights can be written, known before there are any; raises ValueError where they cannot."""
    if path.suffix != ".npz" or not path.parent.is_dir():
        raise ValueError(f"--out {path}: no .npz, or its folder is not there; pass NAME.npz in one that is")
    return path


def save(path: Path, weights: Tensors) -> None:
    """Matrices rounded to bf16, vectors and the convolution's filters float32 as the step reads them.

    A file that is there stays whole until its successor is.
    """
    stored = {}
    for name, value in weights.items():
        value = value.cpu().contiguous()
        narrow = value.ndim > 1
        stored[name] = value.bfloat16().view(torch.uint16).numpy() if narrow else value.float().numpy()
    part = path.with_suffix(".part.npz")
    try:
        np.savez(part, **stored)  # type: ignore[arg-type]
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path = WEIGHTS) -> Tensors:
    """Weights under transformers' names, bf16 and float32. Raises ValueError naming the file where it is none."""
    try:
        with np.load(path) as stored:
            found = {name: torch.from_numpy(stored[name]) for name in stored.files}
    except (OSError, EOFError, ValueError, BadZipFile) as problem:
        remedy = f"python -m kernels.step.tiny.train --out {path.name}"
        raise ValueError(f"{path.name}: no weights ({problem}); {remedy}") from None
    return {n: v.view(torch.bfloat16) if v.dtype == torch.uint16 else v for n, v in found.items()}


def model_of(weights: Tensors) -> Model:
    """The model of MODELS that weights belong to; raises ValueError where shapes are no model's."""
    for model in MODELS.values():
        shapes = {f"{n}.weight": s for n, s in model.linears().items()} | model.others()
        if {n: tuple(v.shape) for n, v in weights.items() if n != "inv_freq"} == shapes:
            return model
    raise ValueError(f"weights: their shapes are none of {', '.join(MODELS)}; train them again")
