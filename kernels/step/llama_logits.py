"""llama.cpp's logits beside ours, on the same weights and tokens: `python -m kernels.step.llama_logits --file F`.

Every sequence is a prompt from empty caches and one decode step behind it. Printed for each of the two steps, as a JSON
line an arm: NMSE against the float64 reference, mean KL divergence in nats of the reference's distribution from the
arm's, and the share of sequences with the reference's most likely token. The file is gguf_file.py's, of the same model,
layers and seed. Needs the package llama-cpp-python; LLAMA_CPP_LIB_PATH names the folder of a build of one's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.common import Tensors, interpreted, positive, usable_device
from kernels.step import cases
from kernels.step.model import MODELS, Model
from kernels.step.peers import llama_cpp

Logits = tuple[torch.Tensor, torch.Tensor]  # behind the prompts and behind the step, [sequences, vocab]


def ours(model: Model, weights: Tensors, tokens: torch.Tensor, step: Callable[[Tensors], Tensors]) -> Logits:
    """The logits of `step`, which gives a step's outputs for its inputs (kernels/step)."""
    count, length = tokens.shape
    device, found = tokens.device, []
    given = weights | cases.empty(model, count, length, device, torch.bfloat16)
    for first, last in ((0, length - 1), (length - 1, length)):
        given["tokens"] = tokens[:, first:last].flatten()
        given["cu_seqlens"] = (last - first) * torch.arange(count + 1, device=device, dtype=torch.int32)
        given["seq_lens"] = torch.full((count,), first, device=device, dtype=torch.int32)
        out = step(given)
        given |= {name: out[name].to(given[name].dtype) for name in cases.IN_PLACE if name in out}
        found.append(out["logits"])
    return found[0], found[1]


def served(given: Tensors) -> Tensors:
    """The outputs of the step as this project serves it."""
    from kernels.step import triton_served

    count, vocab = given["seq_lens"].shape[0], given["lm_head.weight"].shape[0]
    out = {name: given[name].clone() for name in cases.IN_PLACE if name in given}
    out["logits"] = torch.empty(count, vocab, device=given["tokens"].device)
    out["next_token"] = torch.empty(count, dtype=torch.int64, device=given["tokens"].device)
    out["next_logit"] = torch.empty(count, device=given["tokens"].device)
    triton_served.run(triton_served.prepare(given), out)
    return out


def beside(wanted: torch.Tensor, seen: torch.Tensor) -> dict[str, float]:
    """nmse, kl_nats and same_top of logits [sequences, vocab] against the reference's."""
    wanted, seen = wanted.double().cpu(), seen.double().cpu()
    log_p, log_q = wanted.log_softmax(-1), seen.log_softmax(-1)
    return {
        "nmse": float((seen - wanted).square().sum() / wanted.square().sum()),
        "kl_nats": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same_top": float((wanted.argmax(-1) == seen.argmax(-1)).double().mean()),
    }


def main() -> None:
    """Print the lines."""
    from kernels.step.reference import reference

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="a file of kernels.step.peers.gguf_file")
    parser.add_argument("--model", choices=MODELS, default="q36-27b")
    parser.add_argument("--layers", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--sequences", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=32, help="of each prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    if asked.device == "cpu" and not interpreted():
        print("llama_logits: the served step needs a GPU; on the CPU set TRITON_INTERPRET=1", file=sys.stderr)
        raise SystemExit(2)
    try:
        usable_device(asked.device)
        model, rng = MODELS[asked.model].cut(asked.layers), torch.Generator().manual_seed(0)
        tokens = torch.randint(model.vocab, (asked.sequences, asked.tokens + 1), generator=rng)
        other = llama_cpp.logits(asked.file, tokens, (model.layers, model.hidden, model.vocab))
    except ImportError as problem:
        print(f"llama_logits: {asked.file.name}: {problem}; pip install llama-cpp-python brings it", file=sys.stderr)
        raise SystemExit(2) from None
    except (ValueError, OSError, RuntimeError) as problem:
        print(f"llama_logits: {asked.file.name}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    weights, on = cases.weights(model, 0, asked.device), tokens.to(asked.device)
    wanted = ours(model, weights, on, reference)
    arms: dict[str, Any] = {"llama.cpp": other, "served": ours(model, weights, on, served)}
    for number, name in enumerate(("prefill", "decode")):
        for arm, logits in arms.items():
            print(json.dumps({"step": name, "arm": arm, **beside(wanted[number], logits[number])}))


if __name__ == "__main__":
    main()
