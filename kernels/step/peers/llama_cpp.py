"""A user's llama-batched-bench on the step's weights: `python -m kernels.step.peers.llama_cpp --binary B --model F`.

The file is gguf_file.py's. Prints what the tool prints as JSON lines, whole or not at all, with the lines of its log
that name build and GPU; `lab judge CARD --rows candidate=OUT` and `lab.study.own.read` read it. A prefill without
decode takes --ntg 0. The tool needs room for npl * (npp + ntg) tokens in its cache, which -c asks for.
`logits` are those of the library itself, for kernels/step/llama_logits.py.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NEEDED = ("pp", "tg", "pl", "speed_pp", "speed_tg")
LOGGED = ("build", "Device ", "loaded meta data")  # what names build, GPU and model
LONGEST_S = 3600


def command(binary: Path, model: Path, npl: Sequence[int], npp: int, ntg: int, more: Sequence[str] = ()) -> list[str]:
    """The words of a run on one GPU with every layer on it; `more` comes last, such as ("-ctk", "q8_0")."""
    sizes = ["-npp", str(npp), "-ntg", str(ntg), "-npl", ",".join(map(str, npl)), "-c", str(max(npl) * (npp + ntg))]
    return [str(binary), "-m", str(model), "-ngl", "99", "-fa", "on", *sizes, "--output-format", "jsonl", *more]


def run(words: Sequence[str]) -> str:
    """What the tool printed; raises ValueError in one line where it failed, or a line of a size is missing."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ValueError(f"{words[0]}: cannot be run ({problem}); pass the path of llama-batched-bench") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise ValueError(f"{words[0]}: exited with {done.returncode}: {last}; run it by itself and mend that")
    try:
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        rows = [json.loads(re.sub(r": -?nan\b", ": 0", line)) for line in lines]  # a speed of no tokens in no time
    except ValueError as problem:
        raise ValueError(f"{words[0]}: printed a line that is no JSON ({problem}); it was stopped: run again") from None
    wanted = words[words.index("-npl") + 1].split(",")
    missing = [n for n in wanted if not any(str(r.get("pl")) == n and all(k in r for k in NEEDED) for r in rows)]
    if missing:
        raise ValueError(f"{words[0]}: printed no line for npl {missing[0]}; it may lack memory: give fewer --npl")
    log = [line for line in done.stderr.splitlines() if any(word in line for word in LOGGED)]
    return "\n".join((*log, *map(json.dumps, rows))) + "\n"


def logits(path: Path, tokens: torch.Tensor, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """llama.cpp's logits [sequences, vocab], float32 on the CPU, behind the prompts and behind a decode step.

    tokens: [sequences, T + 1], the last of which is the step's; sizes: the model's layers, hidden size and vocabulary.
    Every layer is on the GPU where the library has one. Raises ImportError without llama-cpp-python, ValueError where
    the file cannot be run or is of a model of other sizes.
    """
    import llama_cpp as library
    import torch

    count, length = tokens.shape
    quiet = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(quiet, ctypes.c_void_p(0))
    library.llama_backend_init()
    of_model, of_context = library.llama_model_default_params(), library.llama_context_default_params()
    of_model.n_gpu_layers = 999
    of_context.n_ctx = count * length
    of_context.n_batch = of_context.n_ubatch = count * length
    of_context.n_seq_max = count
    model = library.llama_model_load_from_file(str(path).encode(), of_model)
    if not model:
        raise ValueError(f"{path}: llama.cpp cannot load it; is it of this version, and of a model that it knows?")
    words = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    if (found_sizes := (library.llama_model_n_layer(model), library.llama_model_n_embd(model), words)) != sizes:
        library.llama_model_free(model)
        raise ValueError(
            f"{path}: layers, hidden size and vocabulary are {found_sizes}, asked for {sizes}; give --layers"
        )
    context = library.llama_init_from_model(model, of_context)
    if not context:
        raise ValueError(f"{path}: llama.cpp has no room for {count} sequences of {length} tokens; ask for fewer")
    batch = library.llama_batch_init(count * length, 0, 1)
    try:
        found = []
        for first, last in ((0, length - 1), (length - 1, length)):
            batch.n_tokens = count * (last - first)
            places = [(n, at) for n in range(count) for at in range(first, last)]
            for i, (n, at) in enumerate(places):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(tokens[n, at]), at, 1
                batch.seq_id[i][0], batch.logits[i] = n, at == last - 1
            if code := library.llama_decode(context, batch):
                raise ValueError(f"{path}: llama.cpp's decode gave {code}; ask for fewer sequences or tokens")
            asked = [i for i, (_, at) in enumerate(places) if at == last - 1]
            found.append(torch.tensor([library.llama_get_logits_ith(context, i)[:words] for i in asked]))
    finally:
        library.llama_batch_free(batch)
        library.llama_free(context)
        library.llama_model_free(model)
    return found[0], found[1]


def main() -> None:
    """Run it, and write what it printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--binary", type=Path, required=True, help="a llama-batched-bench")
    parser.add_argument("--model", type=Path, required=True, help="a file of kernels.step.peers.gguf_file")
    parser.add_argument("--npl", default="1,8,32,128")
    parser.add_argument("--npp", type=int, default=1024)
    parser.add_argument("--ntg", type=int, default=64)
    parser.add_argument("--out", type=Path, help="a file; else standard output")
    parser.add_argument("more", nargs="*", help="further words for the tool, after --")
    asked = parser.parse_args()
    try:
        if not all(n.isdecimal() and int(n) for n in asked.npl.split(",")):
            raise ValueError(f"--npl {asked.npl}: not numbers of sequences; pass such as 1,8,32")
        if asked.out and not asked.out.parent.is_dir():
            raise ValueError(f"--out {asked.out}: its folder is not there; make it")
        sizes = [int(n) for n in asked.npl.split(",")]
        text = run(command(asked.binary, asked.model, sizes, asked.npp, asked.ntg, asked.more))
    except ValueError as problem:
        print(f"llama_cpp: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    if not asked.out:
        print(text, end="")
        return
    scratch = asked.out.with_name(f".{asked.out.name}.part")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, asked.out)


if __name__ == "__main__":
    main()
