"""Names of kernels from public traces and sources: none that communicates is taken for computation without a doubt, and
none that computes for communication.
"""

from __future__ import annotations

import pytest

from aorta.timeline.classes import communicates, doubtful, launches_communication

COMMUNICATE = {
    "NVIDIA/nccl src/device/generate.py, and traces": """
        ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)
        ncclAllReduceRingLLKernel_sum_f32(ncclColl)
        ncclReduceScatterRingLLKernel_sum_f16(ncclColl)
        ncclBroadcastRingLLKernel_copy_i8(ncclColl)
        ncclSendRecvKernel_copy_i8(ncclColl)
        ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)
        ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32(ncclSymDevArgs)
        """,
    "ROCm/rccl src/device, and traces": """
        ncclDevKernel_Generic(ncclDevKernelArgs*)
        rcclGenericKernel<1, true>
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t.kd
        mscclKernel_Sum_hip_bfloat16_LL_false
        """,
    "microsoft/mscclpp src and apps": """
        void mscclpp::allreduce7<__half>(__half*, __half*, mscclpp::DeviceHandle<mscclpp::MemoryChannel>*)
        void mscclpp::collective::allreduceAllPairs<(mscclpp::ReduceOp)0, __half>(__half*)
        mscclpp::collective::allgatherFullmesh2(void*, unsigned long, void*)
        void mscclpp::executionKernel<int, mscclpp::LL16Packet>(int, int*)
        """,
    "deepseek-ai/DeepEP csrc/kernels; deepseek-ai/profile-data": """
        void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*, int*, long*, int*, void*)
        void deep_ep::intranode::notify_dispatch<8>(int const*, int*, int const*, int*, int, int)
        _ZN7deep_ep9intranode8dispatchILi8ELi768ELi8192EEEvP4int4PfPi
        _ZN7deep_ep12internode_ll7combineILb0ELi7168ELi11EEEvPvS1_
        void primus_turbo::deep_ep::intranode::cached_notify_combine<8>(void**, int*, int)
        void dpsk::ep::internode::dispatch_ll<true, 7168>(void*, float*, int*)
        void dpsk::ep::intranode::dispatch<8>(int4*, float*)
        void hybrid_ep::dispatch_kernel<hybrid_ep::warp_group<1, 0>, 4, 1, 16>(hybrid_ep::dispatch_kernel_param_t)
        void hybrid_ep::combine_kernel<hybrid_ep::warp_group<1, 0>, 2, 4>(hybrid_ep::combine_kernel_param_t)
        hybrid_ep::device_sync_kernel(unsigned int*, unsigned int*)
        """,
    "ROCm/mori src/ops/dispatch_combine, python/mori/ops": """
        void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(mori::moe::EpDispatchCombineArgs<__hip_bfloat16>)
        void mori::moe::EpCombineIntraNodeKernel<__hip_bfloat16, true>(mori::moe::EpDispatchCombineArgs)
        void mori::moe::EpDispatchInterNodeKernel<hip_fp8>(mori::moe::EpDispatchCombineArgs)
        EpDispatchCopyToStaging_bf16
        EpDispatchInterNodeV1Kernel_bf16
        EpCombineSync_bf16
        EpCombineInterNodeV1Kernel_bf16
        EpCombineAll_bf16
        EpDispatchIntraNodeKernel_bf16_stdmoe
        EpDispatchLowLatencyAsyncSend_bf16
        """,
    "NVIDIA/TransformerEngine userbuffers.cu; rtp-llm": """
        void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int, int, int, int, int, void**)
        kuserbuffers_inc(int*)
        kuserbuffers_pushsend(int*, int*, int4*, int4*, int)
        kuserbuffers_pushrecv(int, int, int, int*, int*, int, unsigned long)
        kuserbuffers_pullsend(int, int, int*, int*)
        kuserbuffers_pullrecv(int, int, int*, int*, int4*, int4*, int)
        kuserbuffers_pushsendrecv(int*, int*, int4*, int4*, int, int)
        kuserbuffers_pushsendrecv_atomic(int*, int*, int4*, int4*, int, int)
        kuserbuffers_pushsendrecv_multiatomic(int*, int*, int4*, int4*, int, int)
        """,
    "pytorch c10d: intra_node_comm.cu, symm_mem": """
        void c10d::intra_node_comm::oneShotAllReduceKernel<8u, false>(__nv_bfloat16*, unsigned long)
        void c10d::intra_node_comm::twoShotAllReduceKernel<8u>(__nv_bfloat16*, unsigned long, unsigned long)
        void c10d::intra_node_comm::hybridCubeMeshAllReduceKernel<false>
        void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**, unsigned long)
        void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8, true>(c10::BFloat16**)
        void <unnamed>::two_shot_all_reduce_kernel_inplace<c10::BFloat16, (int)16, (int)8>(T1 **)
        void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)
        void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(float*, float*, unsigned long)
        void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*, unsigned long)
        void (anonymous namespace)::multimem_one_shot_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)
        void (anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)
        void c10d::symmetric_memory::put_signal_kernel(unsigned int**, int, int, int, int, unsigned long)
        void c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)
        c10d::nvshmem_extension::all_to_all_vdev_kernel(void*, void*, long*, long*)
        void c10d::nvshmem_extension::allToAllV(void*, void*, long*, long*, unsigned long)
        void c10d::nvshmem_extension::exchangeSplitAndOffset<true>(long*, long*)
        nixl_wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)
        nixl_put_signal_kernel(unsigned int**, int, int, int, int, unsigned long)
        """,
    "vLLM csrc/custom_all_reduce.cuh, csrc/quickreduce; SGLang; aiter": """
        void vllm::cross_device_reduce_1stage<half, 8>
        void sglang::cross_device_reduce_1stage<__half, 8>(sglang::RankData*, sglang::RankSignals)
        _ZN5aiter26cross_device_reduce_2stageIDF16bLi8ELb0EEEvPNS_8RankDataE
        void aiter::cross_device_reduce_1stage_naive<float, 8>(aiter::RankData*)
        void aiter::allgather_vec<__hip_bfloat16, 8>(aiter::RankData*)
        void aiter::allgather_lastdim<__hip_bfloat16, 8>(aiter::RankData*)
        void aiter::reduce_scatter_cross_device_store<float, 8>(aiter::RankData*)
        void aiter::reduce_scatter_first_dim<__hip_bfloat16, 8>(aiter::RankData*)
        void aiter::reg_all_gather<8>(void*)
        void aiter::allreduce_fusion_kernel_1stage<__hip_bfloat16, 8>(aiter::AllReduceFusionParams)
        void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half, 8>, __half>(__half const*)
        void quickreduce::twoshot<__half>(__half*)
        void vllm::quick_reduce_fp8<8>(void*)
        void sglang::device::all_reduce_one_shot_push_kernel<__nv_bfloat16, 8u>(sglang::Params)
        void sglang::device::all_reduce_two_shot_pull_kernel<__nv_bfloat16, 4u>(sglang::Params)
        """,
    "flashinfer csrc/trtllm_allreduce*.cu; TensorRT-LLM cpp/tensorrt_llm/kernels": """
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(Pattern)1, __nv_bfloat16, 8>
        void flashinfer::trtllm_moe_allreduce_fusion::moereduction_allreduce_fusion_kernel_oneshot_lamport<true, 8>()
        void flashinfer::trtllm_moe_allreduce_fusion::moefinalize_allreduce_fusion_kernel_oneshot_lamport<true, 8>()
        void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<8, __nv_bfloat16>(__nv_bfloat16*)
        void flashinfer::trtllm_mnnvl_allreduce::rmsNormLamport<8, __nv_bfloat16>(__nv_bfloat16*)
        void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<4, __half>(Params)
        void tensorrt_llm::kernels::moeAllToAllKernel<true>(tensorrt_llm::kernels::MoeCommWorkspace)
        void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8, 1>(DispatchParams)
        void tensorrt_llm::kernels::lowPrecisionTwoShotHierAllReduceKernel<__half, 8>(Params)
        void tensorrt_llm::kernels::fusedMoeCommKernel<8>(FusedMoeCommParams)
        """,
    "oneCCL src/coll; NVSHMEM, rocSHMEM, Intel SHMEM; others": """
        oneapi_ccl_allreduce_entry_sycl_kernel
        oneccl_allreduce_large_bf16_8
        ccl::v1::allgatherv_sycl_kernel
        arc_ll256_allreduce
        nvshmemi_barrier_on_stream_kernel
        void nvshmemi_reduce_on_stream_kernel<__half, (rdxn_ops_t)4>(int, __half*, __half const*)
        nvshmemi_proxy_quiet_entrypoint(int)
        void nvshmemx_signal_wait_until_on_stream_kernel(unsigned long*, int)
        rocshmem_barrier_all_kernel
        ROC_SHMEM_putmem_nbi_wave
        ishmem_int_put_kernel
        dlslime::intranode_alltoall_kernel(void*, int)
        uccl_ep_dispatch_kernel
        void uccl::internode_ll::combine<false, 7168>(void*)
        pplx_dispatch_send_kernel
        void push_pull_halos_1d_kernel<__half, true, false>(__half const*, int, int)
        hcom_allReduce__123_0_1
        hcclAllReduceKernel
        xcclSendRecvKernel
        cnclKernelAllReduceRing
        triton_kernel_one_shot_all_reduce
        two_shot_all_reduce_bias_rms_norm_kernel
        multimem_all_reduce_kernel_triton
        """,
    "Triton-distributed, Kraken, Iris, ThunderKittens: not in the table, so a doubt": """
        persistent_all_gather_kernel_consumer
        kernel_a2a_dispatch
        ring_reduce_scatter_push_1d
        _all_gather_push_kernel
        barrier_all_on_stream_kernel
        kernel_dispatch_token_intra_node
        kernel_combine_token
        persistent_reduce_scatter
        kraken_blockwise_barrier
        cp_engine_all_gather_put_kernel
        """,
}
COMPUTE = {
    "pytorch aten/src/ATen/native/cuda, and traces": """
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>(int)
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>
        void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>
        void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>()
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(int)
        void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::sum_functor>>(int)
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(int)
        void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel>()
        void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)
        void at::native::batch_norm_backward_reduce_kernel<float, float, float, int>(float*)
        void at::native::batch_norm_reduce_statistics_kernel<float, float, int>(float const*)
        void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::cuda::detail::TensorInfo<float>)
        void at::native::mbtopk::gatherTopK<float, unsigned int, 1>(at::cuda::detail::TensorInfo<float>)
        void at_cuda_detail::cub::DeviceReduceSingleTileKernel<at_cuda_detail::cub::DeviceReducePolicy>(int)
        """,
    "CUB, Thrust, rocPRIM, hipCUB": """
        void cub::DeviceReduceKernel<cub::DeviceReducePolicy<float, unsigned int, cub::Sum>::Policy600>(float*)
        void cub::DeviceSegmentedRadixSortKernel<cub::DeviceRadixSortPolicy<float, int, int>::Policy700>(float*)
        void cub::CUB_200200_900_NS::DeviceScanInitKernel<cub::ScanTileState<int>>(cub::ScanTileState<int>, int)
        void cub::detail::for_each::static_kernel<cub::policy_hub_t::policy_350_t, long>(long)
        void thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__parallel_for::ParallelForAgent>(long)
        void rocprim::detail::radix_sort_onesweep_iteration_kernel<rocprim::default_config>(int)
        """,
    "cuBLAS, cuBLASLt, cuDNN, CUTLASS": """
        ampere_sgemm_128x64_tn
        ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_nn
        ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn
        volta_sgemm_128x64_tn
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>
        void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float>>(float const*)
        """,
    "hipBLASLt, rocBLAS, MIOpen, Composable Kernel, aiter": """
        Cijk_Ailk_Bljk_BBS_BH_MT128x128x32
        Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1
        Cijk_Ailk_Bjlk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT192x192x64_MI16x16x1
        Cijk_Alik_Bljk_F8B8BS_BH_MT256x256x128
        wvSplitK_hf_sml_
        wvSplitKQ_hf_
        _ZN5aiter37bf16gemm_fp32bf16_tn_32x64_pf3_splitkE.kd
        void kn_mla_reduce_v1<MlaReduceKernelV1Traits<512, 64, 4>, float, std::bfloat16_t>(MlaReduceKernelV1Params)
        void splitk_reduce_kernel<16, 64, std::bfloat16_t, false, std::bfloat16_t, true>(int)
        """,
    "Inductor (torch.compile)": """
        triton_poi_fused_0
        triton_poi_fused__to_copy_cat_mul_silu_silu_backward_split_1
        triton_red_fused_all_reduce_1
        triton_red_fused__to_copy_add_arange_mul_rms_norm_select_unsqueeze_view_7
        triton_per_fused_native_layer_norm_3
        triton_poi_fused_all_gather_into_tensor_copy_2
        triton_poi_fused_reduce_scatter_tensor_wait_tensor_4
        triton_tem_fused_mm_5
        triton_for_fused_6
        triton_poi_fused_all_to_all_single_clone_9
        triton_poi_fused_nccl_broadcast_1
        """,
    "FlashAttention, flashinfer, xFormers, FlashMLA": """
        void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>
        void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(flash::Flash_fwd_params)
        void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, 4, 3, true>(Params)
        void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8>>(Flash_fwd_mla_params)
        void flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, float, long, 512, 64>(Flash_fwd_mla_params)
        void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>(Flash_bwd_params)
        void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>(Flash_bwd_params)
        void flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128>>, 5, 256>(Params)
        fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)
        fmha_cutlassB_bf16_aligned_64x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)
        void vllm::paged_attention_v2_reduce_kernel<__half, 128, 128, 512>(__half*, float const*)
        """,
    "vLLM, SGLang, DeepGEMM, TensorRT-LLM": """
        void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*, float, int, int)
        void vllm::rotary_embedding_kernel<c10::Half, true>(long const*, c10::Half*, c10::Half*)
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(int)
        void vllm::act_and_mul_kernel<c10::BFloat16, vllm::silu_kernel<c10::BFloat16>>(c10::BFloat16*)
        void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, int>(float const*, bool const*, float*)
        void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*)
        void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16 const*, int)
        fused_moe_kernel
        _moe_sum_reduce_kernel
        _combine_sampled_and_draft_tokens_kernel
        void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 256u, 128u, 128u, 0u, 128u, 4u>(__nv_bfloat16*)
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 1u, 128u, 128u>(float*)
        void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*, int*, int*, int*, bool*, int)
        void moe::dev::routing::routingDeepSeek::routingMainKernel<float, __nv_bfloat16>(Params)
        void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__half, float>(float const*)
        """,
    "Transformer Engine, Apex, Megatron, DeepSpeed, Liger, Primus, Mamba": """
        void transformer_engine::cast_transpose_fused_kernel<false, true, float>(float)
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>(KernelParams)
        void transformer_engine::gated_act_kernel<float, __nv_bfloat16>(float)
        void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(__nv_bfloat16 const*)
        fused_qkvzba_split_reshape_cat_kernel
        split_embedding_codegen_forward_unweighted_kernel
        """,
}


def names(table: dict[str, str]) -> list[str]:
    return [line.strip() for text in table.values() for line in text.strip().splitlines()]


def test_no_kernel_that_communicates_is_computation_without_a_doubt() -> None:
    kernels = names(COMMUNICATE)
    assert len(set(kernels)) == len(kernels)
    assert [name for name in kernels if not communicates(name) and not doubtful(name)] == []
    # All but those of projects that the table does not have are communication.
    unknown = COMMUNICATE["Triton-distributed, Kraken, Iris, ThunderKittens: not in the table, so a doubt"]
    assert {name for name in kernels if not communicates(name)} == {
        line.strip() for line in unknown.strip().splitlines()
    }


def test_no_kernel_that_computes_is_communication() -> None:
    kernels = names(COMPUTE)
    assert len(set(kernels)) == len(kernels)
    assert [name for name in kernels if communicates(name)] == []
    # What an operator of another kind launches stays computation, and few of these names are doubted.
    assert [name for name in kernels if doubtful(name)] == []


@pytest.mark.parametrize(
    ("text", "issues"),
    [
        ("c10d::allreduce_", True),
        ("_c10d_functional::all_gather_into_tensor", True),
        ("symm_mem::one_shot_all_reduce", True),
        ("symm_mem::fused_all_gather_matmul", False),
        ("record_param_comms", True),
        ("ncclAllReduce", True),
        ("nccl:all_reduce", True),
        ("deep_ep.dispatch", True),
        ("aten::mm", False),
        ("dispatch", False),
    ],
)
def test_operators_and_ranges_that_issue_communication(text: str, issues: bool) -> None:
    assert launches_communication(text) is issues


@pytest.mark.parametrize(
    "part", ["nccl", "userbuffers_", "a", "A", "aA", "combine_", "EpDispatch", "deep_ep::", "<", "_"]
)
def test_a_long_name_takes_linear_time(part: str) -> None:
    # Quadratic patterns would take minutes here, and the test's time-out ends them.
    long = part * (250_000 // len(part))
    communicates(long), doubtful(long), launches_communication(long)
