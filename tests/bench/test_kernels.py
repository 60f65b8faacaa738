"""How the layer check tells library kernels from generated ones, and counts those of a layer."""

import pytest

from bench.kernels import is_generated, layer_kernels, library_kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_64x1_tn_align8>(...)", "gemm"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "gemm"),
        ("sm90_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3", "gemm"),
        ("ampere_sgemm_32x32_sliced1x4_tn", "gemm"),
        ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>(...)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __half>(...)", "gemm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>(int, float)", "norm"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float)", "norm"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4>>(...)", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)", "attention"),
        ("void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*, float const*, int)", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>>(int, long)", None),
        ("attention_decode_3", None),
        ("rms_norm_linear_rope_kv_write", None),
        ("triton_poi_fused_add_0", None),
    ],
)
def test_kind_of_a_kernel(name, kind):
    assert library_kind(name) == kind


def test_generated_names_are_plain_identifiers_without_a_vendors_prefix():
    assert is_generated("linear_gemm_tiled")
    assert not is_generated("nvjet_hsh_64x8")
    assert not is_generated("void f<int>(int)")


def test_a_layer_is_what_two_layers_run_more_than_one():
    one = ["embed", "qkv", "attend", "out", "up", "down", "head"]
    two = ["embed", "qkv", "attend", "out", "up", "down", "qkv", "attend", "out", "up", "down", "head"]
    assert layer_kernels(one, two) == ["qkv", "attend", "out", "up", "down"]


def test_a_layer_whose_kernels_have_other_names_still_counts_as_many():
    one = ["embed", "qkv_1", "attend", "head"]
    two = ["embed", "qkv_a", "attend", "qkv_b", "attend", "head"]
    assert len(layer_kernels(one, two)) == 2
