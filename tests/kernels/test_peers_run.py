"""What adapters hand to their libraries, tried on a CPU with stand-ins that keep the libraries' documented conventions.

A stand-in takes the library's layouts (its pool, page order, packed words) and computes the plain formula in float64,
so a wrong transposition, row, scale or argument name shows as a wrong answer. The operators of vLLM are defined with
the schemas of vLLM 0.33's own libraries. Each adapter is run as the harness runs it: once for the check; then again on
poisoned outputs and restored states, as after a timing.
"""

import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels.gdn import cases as gdn_cases
from kernels.gdn.peers import vllm
from kernels.gdn.reference import step
from kernels.kv.peers import vllm_fa3
from kernels.moe.peers import vllm_marlin_moe
from kernels.nvfp4 import mxfp4
from kernels.nvfp4.peers import vllm_marlin
from kernels.nvfp4.reference import weights
from lab.check import accuracy, families
from tests.kernels.peer_layouts import marlin_codes, marlin_scales
from tests.ran import run_once

MARLIN = (
    "marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, "
    "Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor workspace, int b_type_id, SymInt size_m, "
    "SymInt size_n, SymInt size_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor"
)
FA3 = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
FA3_METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
MOE = {
    "topk_softmax": "Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
    "bool renormalize, Tensor? bias",
    "moe_align_block_size": "Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
    "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map",
    "moe_sum": "Tensor input, Tensor! output",
}
MOE_GEMM = (
    "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! b_scales, "
    "Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor! workspace, Tensor sorted_token_ids, "
    "Tensor! expert_ids, Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k, "
    "bool mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k, bool use_atomic_add, "
    "bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, int blocks_per_sm) -> Tensor"
)
Tensors = dict[str, torch.Tensor]


def checks(family: str, name: str) -> list[Any]:
    """The check workloads that a peer takes, as test parameters."""
    loaded = families.load(family)
    peer = loaded.candidate(name)
    found = [w for w in loaded.cases.WORKLOADS if w.role == "check" and not peer.refuses(w)]
    assert found, f"{name} takes no check workload"
    return [pytest.param(family, name, w.id, id=f"{name}-{w.id}") for w in found]


def errors_of(family: str, name: str, workload_id: str) -> list[accuracy.Error]:
    """Errors of the first run, then those of a run on poisoned outputs and restored states with the same arguments."""
    loaded = families.load(family)
    workload, peer = loaded.workload(workload_id), loaded.candidate(name)
    inputs = loaded.cases.inputs(workload, 3, "cpu")
    kept = {key: tensor.clone() for key, tensor in inputs.items()}
    args, own = accuracy.prepared(loaded, peer, inputs), accuracy.outputs(loaded, peer, workload, inputs)
    given = accuracy.handed(own)
    limits = loaded.cases.tolerance(workload, peer.precision)
    wanted = accuracy.expected(loaded, workload, kept, peer.precision)
    found = []
    for _ in range(2):
        peer.run(args, given)
        assert accuracy.misused(own, given, inputs) == ""
        found += [accuracy.compare(key, own[key], wanted[key], limits[key]) for key in limits]
        accuracy.fill(loaded, inputs, own, seed=7)
    assert all(torch.equal(inputs[key], kept[key]) for key in kept)
    return found


# Stand-ins -----------------------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, round_p: bool = False) -> torch.Tensor:
    """o [Hq, D] of one sequence: q [Hq, D], k and v [T, Hkv, D], float64. round_p: e4m3 probabilities up to 2^8."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("hd,thd->ht", q, k) * q.shape[-1] ** -0.5
    p = (logits - logits.amax(1, keepdim=True)).exp()
    total = p.sum(1, keepdim=True)
    if round_p:
        p = (p * 256).float().to(torch.float8_e4m3fn).double() / 256
    return torch.einsum("ht,thd->hd", p, v) / total


def marlin_gemm(a: torch.Tensor, c_or_none: torch.Tensor, b_q_weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    _, b_scales, a_scales, global_scale, zeros, _, type_id, m, n, k, _, _, _ = rest
    assert (a_scales, zeros) == (None, None)
    assert (type_id, (m, k), n) == (562949953487106, tuple(a.shape), c_or_none.shape[1])
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    # As in the kernel: scales come without their 2^7, and the exponent left out of bf16 is 2^-126 to be made good.
    w = table[marlin_codes(b_q_weight).long()] * marlin_scales(b_scales).repeat_interleave(16, dim=1) * 2.0**7
    return c_or_none.copy_(a.double() @ (w * 2.0**-126 * global_scale.double()).T)


def topk_softmax(odds: torch.Tensor, ids: torch.Tensor, _: torch.Tensor, logits: torch.Tensor, *rest: Any) -> None:
    assert rest == (True, None)
    chosen = logits.double().softmax(-1).topk(ids.shape[1], dim=-1)
    odds.copy_(chosen.values / chosen.values.sum(-1, keepdim=True))
    ids.copy_(chosen.indices)


def moe_align_block_size(
    ids: torch.Tensor, experts: int, block: int, places: torch.Tensor, of_block: torch.Tensor, padded: torch.Tensor,
    _: None,
) -> None:  # fmt: skip
    """Pairs by expert, each expert's padded to whole blocks with a number that no pair has; the last experts first."""
    flat = ids.flatten()
    listed: list[int] = []
    owners: list[int] = []
    for e in range(experts):
        its = (flat == e).nonzero().flatten().tolist()
        its += [flat.numel()] * (-len(its) % block)
        listed, owners = listed + its, owners + [e] * (len(its) // block)
    places[: len(listed)], of_block[: len(owners)] = (torch.tensor(x, dtype=torch.int32) for x in (listed, owners))
    padded.fill_(len(listed))


def moe_marlin(a: torch.Tensor, c: torch.Tensor, words: torch.Tensor, *rest: Any) -> torch.Tensor:
    names = [x.name for x in torch.ops._moe_C.moe_wna16_marlin_gemm.default._schema.arguments][3:]
    given = dict(zip(names, rest, strict=True))
    n = given["size_n"]
    assert (given["size_m"], given["size_k"], c.shape[1]) == (*a.shape, n)
    for i in range(int(given["num_tokens_past_padded"]) // given["moe_block_size"]):
        e = int(given["expert_ids"][i])
        places = given["sorted_token_ids"][i * given["moe_block_size"] :][: given["moe_block_size"]].long()
        places = places[places < len(c)]
        x, y = a[places // given["top_k"]], torch.empty(len(places), n, dtype=c.dtype)
        one = (words[e], None, given["b_scales"][e], None, given["global_scale"][e], None, given["workspace"])
        marlin_gemm(x, y, *one, given["b_type_id"], *x.shape[:1], n, x.shape[1], False, True, False)
        odds = given["topk_weights"].flatten()[places, None] if given["mul_topk_weights"] else 1
        c[places] = (y.double() * odds).to(c.dtype)
    return c


def moe_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.double().sum(1))


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.double().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


class HummingLayer:
    """A layer of one weight, or of one for each expert whose rows expert_layout bounds."""

    humming_config = None

    def __init__(
        self, *, shape_n: int, shape_k: int, weight_config: Any, torch_dtype: Any, num_experts: int = 0
    ) -> None:
        assert weight_config == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        self.shape, self.experts = (shape_n, shape_k), num_experts

    def to(self, _: Any) -> "HummingLayer":
        return self

    def load_from_tensors(self, tensors: Tensors) -> None:
        packed, scale, whole = (tensors[name] for name in ("weight", "weight_scale", "weight_scale_2"))
        each = zip(packed, scale, whole, strict=True) if self.experts else ((packed, scale, whole[0]),)
        self.weights = [
            weights({"w_packed": p, "w_scale": s.view(torch.uint8), "w_tensor_scale": w.reshape(1)}) for p, s, w in each
        ]
        assert all(w.shape == self.shape for w in self.weights)

    def transform(self) -> None: ...

    def __call__(self, x: torch.Tensor, compute_config: str, tuning_config: str, **more: torch.Tensor) -> torch.Tensor:
        kind = "grouped_contiguous" if self.experts else "dense"
        assert (kind in compute_config, "tuned" in tuning_config) == (True, True)
        bounds = more["expert_layout"].tolist() if more else [0, len(x)]
        parts = zip(bounds, bounds[1:], self.weights, strict=False)
        return torch.cat([(x[a:b].double() @ w.double().T).to(x.dtype) for a, b, w in parts])


def deep_gemm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, expert: torch.Tensor) -> None:
    """Tiles of 128 rows have one expert, or none; what has none is not written."""
    for at in range(0, len(x), 128):
        owners = set(expert[at : at + 128].tolist()) - {-1}
        assert len(owners) <= 1
        for e in owners:
            out[at : at + 128] = (x[at : at + 128].double() @ w[e].double().T).to(out.dtype)


class RaggedProduct:
    """triton_kernels: routing, and products of rows by expert whose MXFP4 weights lie [E, K / 2, N]."""

    Scales = types.SimpleNamespace  # PrecisionConfig(weight_scale=...)

    @staticmethod
    def routing(logits: torch.Tensor, top_k: int) -> tuple[Any, Any, Any]:
        chosen = logits.topk(top_k, dim=-1)
        order = chosen.indices.flatten().sort(stable=True)
        weight = chosen.values.softmax(-1).flatten()[order.indices]
        data = types.SimpleNamespace(gate_scal=weight, expert=order.values, token=order.indices // top_k)
        return data, "gather", "scatter"

    @staticmethod
    def laid_out(tensor: torch.Tensor, layout: str, **told: int) -> torch.Tensor:
        assert (layout, told) in [("values", {"mx_axis": 1}), ("scales", {"mx_axis": 1, "num_warps": 8})]
        assert tensor.dtype == torch.uint8
        return tensor

    @staticmethod
    def matmul_ogs(
        x: torch.Tensor, w: torch.Tensor, bias: None, *, precision_config: Any, routing_data: Any = None,
        gather_indx: str = "", scatter_indx: str = "", gammas: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        scales = precision_config.weight_scale
        each = [mxfp4.dequantise(p.T.contiguous(), s.T).double() for p, s in zip(w, scales, strict=True)]
        if routing_data is None:
            return (x.double() @ each[0].T).to(x.dtype)
        rows = x[routing_data.token] if gather_indx == "gather" else x
        y = torch.stack([each[e] @ row.double() for e, row in zip(routing_data.expert, rows, strict=True)])
        if scatter_indx != "scatter":
            return y.to(x.dtype)
        assert gammas is not None
        total = y.new_zeros(int(routing_data.token.max()) + 1, y.shape[1])
        return total.index_add_(0, routing_data.token, y * gammas[:, None]).to(x.dtype)


def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    names = [a.name for a in torch.ops._vllm_fa3_C.fwd.default._schema.arguments][3:]
    given = dict(zip(names, rest, strict=True))
    batch, page = q.shape[0], k.shape[1]
    assert given["cu_seqlens_q"].tolist() == list(range(batch + 1))
    assert (given["max_seqlen_k"], given["scheduler_metadata"].item()) == (int(given["seqused_k"].max()), 7)
    for b, length in enumerate(given["seqused_k"].tolist()):
        pages = given["page_table"][b, : -(-length // page)].long()
        keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
        if given["k_descale"] is not None:
            keys, values = (x * given[f"{n}_descale"][b].double()[:, None] for x, n in ((keys, "k"), (values, "v")))
        given["out"][b] = attend(q[b].double(), keys, values, round_p=q.dtype == torch.float8_e4m3fn)
    return []


class FlashInferWrapper:
    """BatchDecodeWithPagedKVCacheWrapper: HND pages, compressed page table."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool, backend: str) -> None:
        assert (layout, use_tensor_cores, backend) == ("HND", True, "fa2")
        assert not workspace.view(torch.int64).any()  # as words: it is 128 MB of bytes

    def plan(self, indptr: torch.Tensor, ids: torch.Tensor, last: torch.Tensor, *axes: int, **types: Any) -> None:
        assert all(t.dtype == torch.int32 for t in (indptr, ids, last))
        assert len(ids) == int(indptr[-1])
        self.rows = [(ids[indptr[i] : indptr[i + 1]].long(), int(n)) for i, n in enumerate(last)]
        self.axes, self.types = axes, types

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        _, kv_heads, page, dim = caches[0].shape
        assert self.axes == (q.shape[1], kv_heads, dim, page)
        assert [self.types[f"{n}_data_type"] for n in ("q", "kv", "o")] == [q.dtype, caches[0].dtype, out.dtype]
        for b, (ids, last) in enumerate(self.rows):
            length = (len(ids) - 1) * page + last
            k, v = (c[ids].transpose(1, 2).flatten(0, 1)[:length].double() for c in caches)
            out[b] = attend(q[b].double(), k, v)


def xqa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    workspace: torch.Tensor, semaphores: torch.Tensor, kv_heads: int, page: int, *, q_scale: float, kv_scale: float,
    kv_layout: str,
) -> None:  # fmt: skip
    """XQA on e4m3: HND pages, one query a sequence, logits by both scales and D^-0.5, o by the cache's."""
    batch, beams, _, _ = q.shape
    assert (beams, kv_layout, tuple(k.shape[1:3]), out.shape) == (1, "HND", (kv_heads, page), q.shape)
    assert (lengths.dtype, tuple(lengths.shape)) == (torch.uint32, (batch, 1))
    assert table.dtype == torch.int32
    assert int(table.min()) >= 0
    assert semaphores.dtype == torch.uint32
    assert not semaphores.view(torch.int32).any()
    assert workspace.numel() >= 1 << 20
    for b, length in enumerate(lengths[:, 0].tolist()):
        ids = table[b, : -(-length // page)].long()
        keys, values = (x[ids].transpose(1, 2).flatten(0, 1)[:length].double() * kv_scale for x in (k, v))
        rounded = q[b, 0].to(torch.float8_e4m3fn).double() * q_scale
        out[b, 0] = attend(rounded, keys, values, round_p=True)


def packed_decode(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, scale: float,
    pool: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, use_qk_l2norm_in_kernel: bool,
) -> None:  # fmt: skip
    """vLLM's packed decode: states [rows, Hv, v, k], row 0 null, gates from raw inputs."""
    _, heads_v, dim, _ = pool.shape
    heads_k = (mixed.shape[1] // dim - heads_v) // 2
    assert (pool.is_contiguous(), out.is_contiguous(), scale) == (True, True, dim**-0.5)
    q, k, v = (x.unflatten(1, (-1, dim)).double() for x in mixed.split([heads_k * dim] * 2 + [heads_v * dim], dim=1))
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads_v // heads_k, dim=1) for x in (q, k))
    g = -rate.double().exp() * torch.nn.functional.softplus(a.double() + bias.double())
    for i, row in enumerate(rows.tolist()):
        out[i] = 0
        if row > 0:
            o, state = step(pool[row].transpose(-1, -2).double(), q[i], k[i], v[i], g[i], b[i].double().sigmoid())
            out[i, 0], pool[row] = o, state.transpose(-1, -2)


def fla_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float,
    initial_state: torch.Tensor, output_final_state: bool, use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """fla's two operators: new outputs, states [N, Hv, k, v] in float32, sequences packed when cu_seqlens is given."""
    assert output_final_state
    assert scale == q.shape[-1] ** -0.5
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    inputs |= {"cu_seqlens": cu_seqlens} if cu_seqlens is not None else {}
    inputs |= {"raw_qk": q} if use_qk_l2norm_in_kernel else {}
    found = families.load("gdn").reference(inputs)
    return found["o"].to(v.dtype), found["final_state"].float()


def fla_chunk_rule(*inputs: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """fla's of a prompt, which it hands to FlashQLA unless it is told not to."""
    assert os.environ.get("FLA_FLASH_QLA") == "0"
    return fla_rule(*inputs, **more)


def flash_qla_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashQLA's: as fla's, for 16-bit tensors with heads of 128."""
    assert q.dtype == k.dtype == v.dtype != torch.float32
    assert q.shape[-1] == v.shape[-1] == 128
    assert "cu_seqlens" not in more or more["cu_seqlens"] is None or len(q) == 1
    return fla_rule(q, k, v, g, beta, **more)


def flashinfer_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g: torch.Tensor, beta: torch.Tensor, scale: float,
    initial_state: torch.Tensor, output_final_state: bool, cu_seqlens: torch.Tensor, use_qk_l2norm_in_kernel: bool,
    output: torch.Tensor, output_state: torch.Tensor, max_seqlen: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashInfer's prefill: packed tokens, g the decay itself, states [sequences, Hv, v, k], outputs given."""
    assert (output_final_state, use_qk_l2norm_in_kernel, scale) == (True, False, q.shape[-1] ** -0.5)
    assert max_seqlen == int(cu_seqlens.diff().max())
    assert all(t.is_contiguous() for t in (q, k, v, g, beta, initial_state, output, output_state))
    assert all(t.dtype == torch.float32 for t in (g, beta, initial_state))
    tokens = {"q": q, "k": k, "v": v, "g": g.double().log(), "beta": beta}
    inputs = {name: x.unsqueeze(0) for name, x in tokens.items()}
    inputs |= {"initial_state": initial_state.transpose(-1, -2), "cu_seqlens": cu_seqlens}
    found = families.load("gdn").reference(inputs)
    output.copy_(found["o"].squeeze(0))
    output_state.copy_(found["final_state"].transpose(-1, -2))
    return output, output_state


# Runs ----------------------------------------------------------------------------------------------------------------


def define(namespace: str, schema: str, function: Callable[..., Any]) -> torch.library.Library:
    """An operator under torch.ops until the library is dropped; skips where the real one is loaded."""
    if hasattr(getattr(torch.ops, namespace), schema.split("(")[0]):
        pytest.skip(f"torch.ops.{namespace} is the real one here")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    return library


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every stand-in in the place of its library."""
    monkeypatch.setattr(vllm_marlin, "load_operators", lambda package, stem: None)
    monkeypatch.setattr(vllm_fa3, "load_operators", lambda package, stem: None)
    monkeypatch.setattr(vllm_marlin_moe, "load_operators", lambda package, stem: None)
    sms = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: sms)
    monkeypatch.setattr(vllm, "_operator", lambda: packed_decode)
    rules = {"chunk_gated_delta_rule": fla_chunk_rule, "fused_recurrent_gated_delta_rule": fla_rule}
    modules = {
        "flashinfer": types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FlashInferWrapper),
        "flashinfer.xqa": types.SimpleNamespace(xqa=xqa),
        "flashinfer.gdn_prefill": types.SimpleNamespace(chunk_gated_delta_rule=flashinfer_rule),
        "humming.layer": types.SimpleNamespace(HummingLayer=HummingLayer),
        "humming.tune": types.SimpleNamespace(get_heuristics_config=lambda *_, **__: {"tuned": 1}),
        "deep_gemm": types.SimpleNamespace(m_grouped_bf16_gemm_nt_contiguous=deep_gemm),
        "triton_kernels.matmul_ogs": types.SimpleNamespace(
            matmul_ogs=RaggedProduct.matmul_ogs, PrecisionConfig=RaggedProduct.Scales
        ),
        "triton_kernels.matmul_ogs_details": types.SimpleNamespace(
            opt_flags=types.SimpleNamespace(update_opt_flags_constraints=lambda given: None)
        ),
        "triton_kernels.routing": types.SimpleNamespace(routing=RaggedProduct.routing),
        "triton_kernels.tensor": types.SimpleNamespace(
            FP4="fp4", convert_layout=RaggedProduct.laid_out, wrap_torch_tensor=lambda tensor, dtype=None: tensor
        ),
        "triton_kernels.tensor_details": types.SimpleNamespace(
            layout=types.SimpleNamespace(
                make_default_matmul_mxfp4_w_layout=lambda mx_axis: ("values", {"mx_axis": mx_axis}),
                make_default_matmul_mxfp4_w_scale_layout=lambda **told: ("scales", told),
            )
        ),
        "fla": types.SimpleNamespace(),
        "flash_qla": types.SimpleNamespace(chunk_gated_delta_rule=flash_qla_rule),
        "fla.ops": types.SimpleNamespace(),
        "fla.ops.gated_delta_rule": types.SimpleNamespace(**rules),
    }
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    defined = [
        define("_C", MARLIN, marlin_gemm),
        define("_C", "silu_and_mul(Tensor! result, Tensor input) -> ()", silu_and_mul),
        define("_moe_C", MOE_GEMM, moe_marlin),
        *(define("_moe_C", f"{name}({given}) -> ()", globals()[name]) for name, given in MOE.items()),
        define("_vllm_fa3_C", FA3, fa3),
        define("_vllm_fa3_C", FA3_METADATA, lambda *given: torch.tensor([7], dtype=torch.int32)),
    ]
    yield
    for library in defined:
        library._destroy()


MIXTURES = ("vllm_marlin_moe", "humming_moe", "deep_gemm_moe", "triton_kernels_moe")
KV = ("vllm_fa3", "vllm_fa3_fp8", "flashinfer_bf16", "flashinfer_fp8", "flashinfer_xqa_fp8")
RUNS = [
    *checks("nvfp4", "vllm_marlin"),
    *(run for name in ("fla_chunk", "fla_fused_recurrent", "vllm_packed_decode") for run in checks("gdn", name)),
    *checks("gdn", "flashinfer_chunk"),
    *checks("gdn", "flash_qla_chunk"),
    *(run for name in MIXTURES for run in checks("moe", name)),
    *(run for name in KV for run in checks("kv", name)),
]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("family", "name", "workload"), RUNS)
@pytest.mark.slow
def test_stand_in_gives_the_reference(family: str, name: str, workload: str) -> None:
    for error in errors_of(family, name, workload):
        assert error.ok, error


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("family", "name", "workload"), checks("kv", "vllm_fa3_fp8"))
def test_fp8_qkv_tolerance_is_not_slack(family: str, name: str, workload: str) -> None:
    """The roundings that the precision is about fill a fair part of the limit; one token has no roundings of p."""
    if families.load(family).workload(workload)["ctx"] > 17:
        assert max(e.relative_error / e.relative_limit for e in errors_of(family, name, workload)) > 0.2


@pytest.mark.usefixtures("libraries")
def test_marlin_with_small_block_scales() -> None:
    """Block scales far below e4m3's largest are raised together, and the tensor scale takes that back."""
    family = families.load("nvfp4")
    peer = family.candidate("vllm_marlin")
    workload = next(w for w in family.cases.WORKLOADS if not peer.refuses(w))
    inputs = family.cases.inputs(workload, 3, "cpu")
    inputs["w_scale"] = inputs["w_scale"].clamp(4, 60)
    out = run_once(family, peer, workload, inputs)
    limit = family.cases.tolerance(workload, peer.precision)["y"]
    assert accuracy.compare("y", out["y"], family.reference(inputs)["y"], limit).ok


def test_raw_gates_give_the_gates_back() -> None:
    g = -torch.logspace(-6, 1.3, 200)
    beta = torch.linspace(1e-6, 1 - 1e-6, 200)
    a, b = gdn_cases.raw_gates(g, beta)
    assert a.dtype == b.dtype == torch.float32
    assert torch.allclose((-torch.nn.functional.softplus(a.double())).exp(), g.double().exp(), rtol=0, atol=2**-23)
    assert torch.allclose(b.double().sigmoid(), beta.double(), rtol=0, atol=2**-23)


def test_vllm_pool_lies_around_the_state() -> None:
    """A row of the pool is a state transposed, one further on, and the row ahead of them is nobody's."""
    family = families.load("gdn")
    peer = family.candidate("vllm_packed_decode")
    workload = next(w for w in family.cases.WORKLOADS if not peer.refuses(w))
    inputs = family.cases.inputs(workload, 3, "cpu")
    state = accuracy.outputs(family, peer, workload, inputs)["state"]
    pool = vllm.pool_of(state)
    assert pool.is_contiguous()
    assert not pool[0].any()
    assert torch.equal(pool[1:].transpose(-1, -2), inputs["state"])
    pool[1, 0, 2, 3] = 42.0  # v = 2, k = 3 in vLLM's layout
    assert state[0, 0, 3, 2] == 42.0
