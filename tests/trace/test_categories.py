"""Which category a kernel's name gets: every example of every rule, lists of real names, our own, JSON rules."""

import ast
import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from lab.base.errors import REPOSITORY
from lab.check import families
from lab.cli import main
from lab.trace import breakdowns, categories
from lab.trace.categories import OTHER
from lab.trace.files import read
from lab.trace.model import Total, totals_by_name
from tests.refused import refused
from tests.trace.nsys_synthetic import Export
from tests.trace.test_readers import REAL as REAL_FILES
from tests.trace.test_readers import unpacked

RULES = categories.default()
EXAMPLES = [(rule, name) for rule in RULES.rules for name in rule.examples]

# Names as nsys, Kineto and `nsys stats` print them, from public captures, with what a reader of the code calls them.
# They are chosen where an earlier or wider rule could take them.
REAL = {
    "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(Flash_fwd_params)": "attention",
    "void cutlass::device_kernel<flash::enable_sm80_to_sm89<flash::FlashAttnFwdSm80<...>>>(T1::Params)": "attention",
    "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvSlidingOrChunkedCausalP16VarSeqQ128Kv128PersistentContext": "attention",
    "void mul_mat_q<(ggml_type)39, (int)128, (bool)0>(const char *, const int *, float *)": "quantised_gemm",
    "void mul_mat_q_stream_k_fixup<(ggml_type)39, (int)128, (bool)0>(const int *, float *)": "gemm_fixup",
    "void mul_mat_vec_q<(ggml_type)8, (int)1, (bool)0, (bool)0>(const void *, float *)": "quantised_gemv",
    "void mul_mat_vec_f<float, float, 1, 256>(float const*, float const*, float*)": "dense_gemv",
    "void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)0>(const float *, void *)": "act_quant",
    "void unary_gated_op_kernel<&(op_silu(float)), float>(const float *, float *)": "gate_elementwise",
    "void unary_op_kernel<&(op_sigmoid(float)), float>(const float *, float *, int)": "gate_elementwise",
    "void unary_op_kernel<&(op_sqr(float)), float>(const float *, float *, int)": "elementwise",
    "void k_bin_bcast<&(op_add(float, float)), float, float, float>(const float *)": "elementwise",
    "void cpy_flt<&(cpy_1_flt(const char *, char *))>(const char *, char *)": "layout_or_convert",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>(int)": "layout_or_convert",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<(anonymous namespace)::"
    "masked_fill_kernel(at::TensorIterator&)::{lambda()#1}>>(int)": "elementwise",
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_put_kernel_impl<"
    "at::native::OpaqueType<2> >>>(long)": "scatter",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(T3)": "reduce",
    "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*, c10::BFloat16 const*)": "norms",
    "void vllm::rms_norm_static_fp8_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn>(c10::Float8_e4m3fn*)": "act_quant",
    "void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, int>(float const*)": "moe_dispatch",
    "void cutlass::device_kernel<vllm::cutlass_3x_gemm<cutlass::float_e4m3_t, float>>(T1::Params)": "quantised_gemm",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize2x1x1": "quantised_gemm",
    "void vllm::moe_wna16_gemm_kernel<__half, 4, 4>(__half const*, __half*)": "quantised_gemm",
    "void mul_mat_vec_p021_f16_f32<1>(void const*, float const*, float*)": "dense_gemv",
    "void k_copy_src1_to_contiguous(char const*, char*, int*)": "layout_or_convert",
    "reduce_segments": "attention",
    "nvjet_sm100_tst_128x8_64x12_4x1_v_bz_TNT": "dense_gemm",
    "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)": "norms",
    "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u, float, int>(float*)": "sampling",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collective",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "gdn_recurrence",
    "chunk_local_cumsum_scalar_kernel": "gdn_recurrence",
    "l2norm_fwd_kernel": "gdn_l2norm",
    "layer_norm_gated_fwd_kernel": "norms",
    "cumsum_kernel": "gdn_recurrence",  # ours, by its whole name
    "void cumsum_kernel<float, true>(float const*, float*, long)": "reduce",  # ggml's
    "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>(int)": "elementwise",
    "at::cuda::(anonymous namespace)::spin_kernel(long)": "spin_wait",
    "add_one(const float *, float *, int)": OTHER,
}  # fmt: skip


def taken_by(name: str) -> str:
    return next((rule.match for rule in RULES.rules if re.search(rule.match, name)), "no rule")


def misplaced(wanted: Iterable[tuple[str, str]]) -> list[str]:
    """Each (name, category) whose name lands elsewhere, with the rule that takes it."""
    return [
        f"{name}: {RULES.category(name)}, not {category}; taken by {taken_by(name)}"
        for name, category in wanted
        if RULES.category(name) != category
    ]


def test_example_lands_in_its_category() -> None:
    assert len(EXAMPLES) >= 200
    assert misplaced((name, rule.category) for rule, name in EXAMPLES) == []


def test_real_name() -> None:
    assert misplaced(REAL.items()) == []


def test_every_rule_has_an_example_but_for_catch_all_words() -> None:
    bare = [rule.match for rule in RULES.rules if not rule.examples]
    assert bare == []


def test_order_decides(tmp_path: Path) -> None:
    """The rules above only work in their order: reversed, attention of CUTLASS becomes a product."""
    name = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>(flash::Params)"
    reversed_rules = categories.Rules(RULES.rules[::-1], RULES.categories)
    assert RULES.category(name) == "attention"
    assert reversed_rules.category(name) == "dense_gemm"


def own_kernels() -> list[str]:
    """The @triton.jit functions of kernels/ that are launched (by our convention their names end in _kernel)."""
    found = []
    for path in sorted((REPOSITORY / "kernels").glob("*/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            if any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found.append(node.name)
    return found


def test_own_kernels_have_a_category() -> None:
    names = own_kernels()
    assert len(names) >= 12
    assert [n for n in names if RULES.category(n) == OTHER] == []
    cuda = re.findall(r'"(nvfp4_gemv_[a-z0-9_{}]+)"', (REPOSITORY / "kernels/nvfp4/cuda_gemv.py").read_text())
    assert cuda
    assert {RULES.category(n) for n in cuda} == {"quantised_gemv"}
    compiled = [k for name in families.names() for s in families.load(name).cuda_sources for k in s.kernels]
    assert len(compiled) >= 40
    assert [k for k in compiled if RULES.category(k) == OTHER] == []


def test_waits_are_not_busy() -> None:
    assert [c for c in RULES.categories if not RULES.busy(c)] == ["spin_wait"]
    assert not RULES.busy("contamination")
    assert RULES.busy(OTHER)


def test_recorded_names_have_ours() -> None:
    assert RULES.canonical("moe_or_fp4_gemm") == "quantised_gemm"
    assert RULES.canonical("attention") == "attention"
    words = {r.category for i in breakdowns.recorded_ids() for r in breakdowns.rows(i)}
    unused = {w for c in RULES.categories.values() for w in c.also} - words
    assert unused == set(), "an `also` that no recorded table uses"


# "other" ------------------------------------------------------------------------------------------------------------


def test_other_warns_above_its_limit_and_names_the_largest() -> None:
    def said(whole_us: int, **us: int) -> str:
        totals = [Total(f"void {name}<int>(int)", 1, value * 1000) for name, value in us.items()]
        return " ".join(categories.other_warning(RULES, totals, whole_us * 1000))

    assert all(words in said(100, foo=6, bar=1) for words in ("7.0%", "foo 6 us", "bar 1 us"))
    assert (said(100, foo=5), said(0)) == ("", "")
    assert "and 3 more" in said(20, **{f"k{i}": 1 for i in range(8)})


# Files --------------------------------------------------------------------------------------------------------------

TOML = '[category.a]\nmeaning = "x"\n[[rule]]\ncategory = "a"\nmatch = "k"\n'
REFUSED = (
    ("r.toml", TOML.replace('category = "a"', 'category = "b"'), '"b"'),
    ("r.toml", TOML.replace('"k"', '"("'), "'('"),
    ("r.toml", TOML.replace("match", "pattern"), '"pattern"'),
    ("r.toml", "", "rules"),
    ("r.toml", "x", "TOML"),
    ("r.txt", "", "category rules"),
)


def test_refused(tmp_path: Path) -> None:
    for name, content, words in REFUSED:
        (tmp_path / name).write_text(content)
        with refused(name, words):
            categories.load(tmp_path / name)


def test_the_good_file_of_the_refusals_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(TOML)
    names = ["k", "z", "nvjet_tst_64x64"]
    assert categories.load(tmp_path / "r.toml", only=True).assign(names) == ["a", OTHER, OTHER]
    assert categories.load(tmp_path).assign(names) == ["a", OTHER, "dense_gemm"], "theirs first, then ours"


def test_a_users_rules_make_other_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They come before ours, may use our categories, and replace them only when asked."""
    export = Export()
    for i, name in enumerate(("their_kernel", "nvjet_tst_64x64", "unknown")):
        export.kernel(name, i * 100, i * 100 + 100)
    path = str(export.write(tmp_path / "a.sqlite"))
    rules = tmp_path / "r.toml"
    rules.write_text('[[rule]]\ncategory = "attention"\nmatch = "their_"\n')
    shown = {}
    for option in ([], ["--rules", str(rules)], ["--rules", str(rules), "--rules-only"]):
        assert main.main(["trace", path, "--json", *option]) == 0
        found = json.loads(capsys.readouterr().out)["categories"]
        shown[len(option)] = {c["name"]: c["count"] for c in found if c["count"]}
    assert shown == {
        0: {"other": 2, "dense_gemm": 1},
        2: {"attention": 1, "dense_gemm": 1, "other": 1},
        3: {"attention": 1, "other": 2},
    }


# Public captures, read whole: share of kernel time without a category. What was in "other" before is in examples of
# data/categories/2b_libraries.toml; the names that are here were misfiled by a wider rule.
MISFILED = {
    "triton_poi_fused_addmm_gelu_view_15": "gate_elementwise",
    "triton_poi_fused_addmm_clone_permute_view_25": "elementwise",
    "triton_per_fused__to_copy_addmm_mean_pow_view_7": "reduce",
    "triton_red_fused_add_addmm_mul_native_layer_norm_split_unsqueeze_view_16": "norms",
    "triton_tem_fused_addmm_3": "dense_gemm",
    "igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt64x64x64_wt32x32x8_ws1x1_wr1x1_ta1x4x1x4_1x16x1x16": "convolution",
    "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3": "convolution",
    "sm50_xmma_pooling_fw_4d_FP16FP32NHWC_Max_FastFraction_execute_kernel_cudnn": "reduce",
    "void cuda::swiglu_forward_with_weight_and_per_token_cast_to_fp8_with_channels_impl<__nv_bfloat16>(int)":
        "gate_elementwise",
    "void cuda::cast_back_impl<__nv_fp8x2_e4m3>(void const*, void*, float const*, int, int)": "layout_or_convert",
    "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, long*, int, int const*)": "collective",
    "void deep_gemm::transpose_fp32<512u, 64u>(float const*, float*, unsigned int)": "layout_or_convert",
}  # fmt: skip


def test_names_that_a_wider_rule_took() -> None:
    assert misplaced(MISFILED.items()) == []


def test_committed_captures_leave_little_in_other(tmp_path: Path) -> None:
    for name in ("vllm_eager_b200.json.gz", "decode_kern_sum.csv", "two_gpus_2026.2.1.sqlite"):
        path = unpacked(name, tmp_path) if name.endswith(".sqlite") else REAL_FILES / name
        totals = totals_by_name(read(path))
        rest = sum(t.sum_ns for t in totals if RULES.category(t.name) == OTHER)
        assert rest < 0.03 * sum(t.sum_ns for t in totals), name


def test_names_of_public_captures_keep_their_category() -> None:
    """What was looked at: a name of each kind in forty public captures of TraceLens and Holistic Trace Analysis (H100,
    B200, MI210 to MI350; PyTorch, vLLM, SGLang, diffusers, JAX) and the given ones. In none is 3 % of the time "other".
    """
    with (REAL_FILES / "names.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 300
    assert misplaced((row["name"], row["category"]) for row in rows) == []
    assert sum(row["category"] == OTHER for row in rows) < 20, "each of them is below 1 % of its capture"
