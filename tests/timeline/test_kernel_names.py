"""Names of kernels from public traces and sources: none that communicates is taken for computation without a doubt, and
none that computes for communication.
"""

from __future__ import annotations

import pytest

from aorta.timeline.kernel_names import communicates, doubtful, launches_communication

COMMUNICATE = {
    "NVIDIA/nccl src/device/generate.py, and traces": """
        ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_Sum_f64_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_Sum_u8_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_MinMax_u64_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_PreMulSum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllReduce_SumPostDiv_i64_TREE_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Reduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_ReduceScatter_PreMulSum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)
        ncclKernel_AllReduce_TREE_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)
        ncclKernel_AllReduce_RING_LL_Sum___nv_bfloat16(ncclDevComm*, unsigned long, ncclWork*)
        ncclKernel_AllReduce_RING_LL_Sum_int8_t(ncclWorkElem)
        ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)
        ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)
        ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)
        ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)
        ncclAllReduceRingLLKernel_sum_f32(ncclColl)
        ncclAllReduceTreeLLKernel_sum_f16(ncclColl)
        ncclAllReduceRingLLKernel_sum_i32(ncclColl)
        ncclReduceScatterRingLLKernel_sum_f16(ncclColl)
        ncclBroadcastRingLLKernel_copy_i8(ncclColl)
        ncclAllGatherRingLLKernel_copy_i8(ncclColl)
        ncclReduceRingLLKernel_sum_f32(ncclColl)
        ncclSendRecvKernel_copy_i8(ncclColl)
        ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f8e5m2(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_AllReduce_AGxLLMC_R_sum_f16(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_ReduceScatter_LDMC_sum_f8e4m3(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_ReduceScatter_LL_sum_f32(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_ReduceScatter_RailA2A_LsaLD_avg_bf16(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)
        ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)
        ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32(ncclSymDevArgs)
        """,
    "ROCm/rccl src/device, and traces": """
        ncclDevKernel_Generic(ncclDevKernelArgs*)
        ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Generic_2(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernelDebug_Generic_4(ncclDevKernelArgsStorage<4096ul>)
        rcclGenericKernel<1, true>
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t.kd
        mscclKernel_Sum_hip_bfloat16_LL_false
        mscclKernel_Sum_half_Simple(ncclDevComm*, mscclAlgo*, mscclWork*)
        mscclKernel_Sum_float_LL128_true
        """,
    "microsoft/mscclpp src and apps": """
        void mscclpp::allreduce7<__half>(__half*, __half*, mscclpp::DeviceHandle<mscclpp::MemoryChannel>*)
        void mscclpp::collective::allreduceAllPairs<(mscclpp::ReduceOp)0, __half>(__half*)
        mscclpp::collective::allgatherFullmesh2(void*, unsigned long, void*)
        void mscclpp::executionKernel<int, mscclpp::LL16Packet>(int, int*)
        void mscclpp::collective::allreduceNvls<float>(mscclpp::DeviceHandle<mscclpp::SwitchChannel>*)
        """,
    "deepseek-ai/DeepEP csrc/kernels; deepseek-ai/profile-data": """
        void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*, int*, long*, int*, void*)
        void deep_ep::internode_ll::dispatch<false, false, 7168>(void*, float*, int*, long*)
        void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*, void*, int*, void*, void const*, long const*)
        void deep_ep::internode_ll::clean_low_latency_buffer<128>(long*, int, long*, int)
        void deep_ep::internode::notify_dispatch<false, 4>(int const*, int*, int)
        void deep_ep::internode::dispatch<false, 4, true, 7, 128>(int4*, float*, long*)
        void deep_ep::internode::cached_notify<true>(int, int, int, int*)
        void deep_ep::internode::combine<false, 4, __nv_bfloat16, 24>(int4*, float*)
        void deep_ep::internode::get_rdma_buffer(int)
        void deep_ep::intranode::notify_dispatch<8>(int const*, int*, int const*, int*, int, int)
        void deep_ep::intranode::cached_notify_dispatch<8>(int const*, int, void**, int**, int)
        void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*, float*)
        void deep_ep::intranode::cached_notify_combine<8>(void**, int*, int, int)
        void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*, float*)
        void deep_ep::intranode::barrier<8>(int**, int)
        _ZN7deep_ep9intranode8dispatchILi8ELi768ELi8192EEEvP4int4PfPi
        _ZN7deep_ep12internode_ll7combineILb0ELi7168ELi11EEEvPvS1_
        void primus_turbo::deep_ep::intranode::cached_notify_combine<8>(void**, int*, int)
        void primus_turbo::deep_ep::intranode::dispatch<8, 1024, 8192>(int4*, float*)
        void deep_ep::internode_ll::dispatch_opt1_hidden6144<1, false, 1>(void*, void*, float*)
        void dpsk::ep::internode::dispatch_ll<true, 7168>(void*, float*, int*)
        void dpsk::ep::internode::combine_ll<7168>(void*, int*)
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
        EpDispatchInterNodeV1KernelLowLatency_fp8
        EpCombineSync_bf16
        EpCombineSyncBarrier_bf16
        EpCombineInterNodeV1Kernel_bf16
        EpCombineInterNodeV1KernelLowLatency_bf16
        EpCombineAll_bf16
        EpDispatchIntraNodeKernel_bf16_stdmoe
        EpDispatchLowLatencyAsyncSend_bf16
        EpDispatchLowLatencyAsyncRecv_bf16
        """,
    "NVIDIA/TransformerEngine userbuffers.cu; rtp-llm": """
        void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int, int, int, int, int, void**)
        void userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int, int, int, int, int, int, int, void**, int, unsigned long)
        void userbuffers_fp16_sum_inplace_gpu_rr<4>(int, int, int, int, int, int, int, void**)
        void userbuffers_fp16_sum_inplace_gpu_rr_rs<8>(int, int, int, int, int, int, int, void**)
        void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int, int, int, int, int, int, int, void**)
        void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_fp8<8, __nv_fp8_e5m2>(int, int, float*)
        void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_stride_multiatomic_fp8<4, __nv_fp8_e4m3>(int)
        void userbuffers_fp16_sum_inplace_gpu_mc_rs_oop<8>(int, int, int, int, int, float4*)
        void userbuffers_fp16_sum_inplace_gpu_mc_ag<8>(int, int, int, int, int, uint4*)
        userbuffers_fp16_sum_inplace_gpu_null(int, int*, int*, int)
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
        void vllm::cross_device_reduce_2stage<__nv_bfloat16, 4>(vllm::RankData*, vllm::RankSignals)
        void sglang::cross_device_reduce_1stage<__half, 8>(sglang::RankData*, sglang::RankSignals)
        void sglang::cross_device_reduce_2stage<__half, 8>(sglang::RankData*, sglang::RankSignals)
        void sglang::cross_device_reduce_half_butterfly<__half, 8>(sglang::RankData*)
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
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<(Pattern)1, __half, 8, true>()
        void flashinfer::trtllm_moe_allreduce_fusion::moereduction_allreduce_fusion_kernel_oneshot_lamport<true, 8>()
        void flashinfer::trtllm_moe_allreduce_fusion::moefinalize_allreduce_fusion_kernel_oneshot_lamport<true, 8>()
        void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<8, __nv_bfloat16>(__nv_bfloat16*)
        void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8, __nv_bfloat16, true>(__nv_bfloat16*)
        void flashinfer::trtllm_mnnvl_allreduce::rmsNormLamport<8, __nv_bfloat16>(__nv_bfloat16*)
        void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<4, __half>(Params)
        void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_twoshot_direct<__half, 8>(Params)
        void tensorrt_llm::kernels::ar_fusion::moe::moefinalize_allreduce_fusion_kernel_oneshot_lamport<8>(Params)
        void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8, true, false>(AllReduceParams)
        void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8, true>(AllReduceParams)
        void tensorrt_llm::kernels::reduce_fusion::one_shot_all_reduce_norm_kernel<__half, 8, true>(AllReduceParams)
        void tensorrt_llm::kernels::mnnvl::twoshotAllreduceKernel<8, __half>(__half*)
        void tensorrt_llm::kernels::mnnvl::oneshotAllreduceFusionKernel<8, __half>(__half*)
        void tensorrt_llm::kernels::moeAllToAllKernel<true>(tensorrt_llm::kernels::MoeCommWorkspace)
        void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8, 1>(DispatchParams)
        void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<__half, 8>(CombineParams)
        void tensorrt_llm::kernels::moe_comm::moeA2APrepareDispatchKernel(int*)
        void tensorrt_llm::kernels::lowPrecisionTwoShotHierAllReduceKernel<__half, 8>(Params)
        void tensorrt_llm::kernels::lowPrecisionTwoShotAllReduceKernel<__half, 8>(Params)
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
        void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor>>(int)
        void at::native::elementwise_kernel_manual_unroll<128, 4, at::native::gpu_kernel_impl<at::native::tanh>>(int)
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(int)
        void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::sum_functor>>(int)
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(int)
        void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel>()
        void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)
        void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_put>>(long)
        void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(int)
        void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>, unsigned, 2>(int)
        void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<4u>, unsigned, 1>(int)
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>(int)
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)
        void at::native::(anonymous namespace)::cuComputePartGradGammaBeta<float, float>(float const*)
        void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u>(long)
        void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float, float>(float const*)
        void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>(int)
        void at::native::(anonymous namespace)::cunn_SoftMaxBackward<8, float, float, float>(float*)
        void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)
        void at::native::(anonymous namespace)::nll_loss_backward_reduce_cuda_kernel_2d<float, long>(float*)
        void at::native::(anonymous namespace)::max_pool_forward_nchw<float, int>(int, float const*)
        void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(long)
        void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, long>(long const*)
        void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*, float*)
        void at::native::(anonymous namespace)::krn_partials_per_segment<long>(long*, long const*)
        void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<float, float>(int)
        void at::native::(anonymous namespace)::searchsorted_cuda_kernel<long, long>(long*)
        void at::native::batch_norm_collect_statistics_channels_last_kernel<at::native::Var, float, float, 4>(float*)
        void at::native::batch_norm_transform_input_channels_last_kernel<float, float, float, 4>(float const*)
        void at::native::batch_norm_backward_reduce_kernel<float, float, float, int>(float*)
        void at::native::batch_norm_reduce_statistics_kernel<float, float, int>(float const*)
        void at::native::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(float const*)
        void at::native::radixSortKVInPlace<-2, -1, 128, 8, long, long, unsigned int>(at::cuda::detail::TensorInfo)
        void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::cuda::detail::TensorInfo<float>)
        void at::native::mbtopk::gatherTopK<float, unsigned int, 1>(at::cuda::detail::TensorInfo<float>)
        void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float>>(float*, float const*)
        void at::native::im2col_kernel<float>(long, float const*, long, long)
        void at::native::triu_tril_kernel<float, int, false, 2>(float*)
        void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::DeviceScanPolicy<int>::Policy900>(int*)
        void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy>(int)
        void at_cuda_detail::cub::DeviceReduceSingleTileKernel<at_cuda_detail::cub::DeviceReducePolicy>(int)
        void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(int)>(int)
        void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*)
        void (anonymous namespace)::softmax_warp_backward<float, float, float, 8, false, false>(float*, float const*)
        c10d::checkForNan(float*, unsigned long)
        """,
    "CUB, Thrust, rocPRIM, hipCUB": """
        void cub::DeviceReduceKernel<cub::DeviceReducePolicy<float, unsigned int, cub::Sum>::Policy600>(float*)
        void cub::DeviceSegmentedRadixSortKernel<cub::DeviceRadixSortPolicy<float, int, int>::Policy700>(float*)
        void cub::CUB_200200_900_NS::DeviceScanInitKernel<cub::ScanTileState<int>>(cub::ScanTileState<int>, int)
        void cub::detail::for_each::static_kernel<cub::policy_hub_t::policy_350_t, long>(long)
        void thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__parallel_for::ParallelForAgent>(long)
        void rocprim::ROCPRIM_400200_NS::detail::trampoline_kernel<rocprim::default_config>(int)
        void rocprim::detail::radix_sort_onesweep_iteration_kernel<rocprim::default_config>(int)
        void hipcub::DeviceSelectSweepKernel<int>(int)
        """,
    "cuBLAS, cuBLASLt, cuDNN, CUTLASS": """
        ampere_sgemm_128x64_tn
        ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_nn
        ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn
        volta_sgemm_128x64_tn
        turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn
        sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64_warpgroupsize1x1x1
        sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128_cublas
        sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32
        sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc
        sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc
        nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT
        nvjet_tst_320x64_64x4_2x1_2cta_v_bz_TNT
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>
        void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParamsEx)
        void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false>(cublasGemmSmallNParams)
        void internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, float, false, true, true>(int)
        void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const>>>(int)
        void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float>>(float const*)
        void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_nn_align8>(Params)
        void cutlass::Kernel<cutlass_75_tensorop_f16_s1688gemm_f16_256x128_nn_align8>(Params)
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(Params)
        void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>(Params)
        cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_64x128x16_1x1x1_3_tnn_align1
        cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8
        void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)
        void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(cudnn::ops::nchw2nhwc_params_t)
        void cudnn::engines_precompiled::nhwcToNchwKernel<float, float, float, true>(Params)
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64
        void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false>(int)
        void winograd_nonfused::winogradForwardData4x4<float, float>(winograd_nonfused::WinogradDataParams)
        void magma_sgemmEx_kernel<float, float, float, false, true, 6, 3, 4, 3, 3>(int)
        void fft2d_r2c_32x32<float, false, 1u, false>(float2*, float const*)
        """,
    "hipBLASLt, rocBLAS, MIOpen, Composable Kernel, aiter": """
        Cijk_Ailk_Bljk_BBS_BH_MT128x128x32
        Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1
        Cijk_Ailk_Bjlk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT192x192x64_MI16x16x1
        Cijk_Alik_Bljk_F8B8BS_BH_MT256x256x128
        Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT64x16x64_MI16x16x1_SN_LDSB0
        Cijk_SS_BiasS_HAS_ScaleAlphaVec_PostGSU8_VW4
        wvSplitK_hf_sml_
        wvSplitKQ_hf_
        LLGemm1_kernel
        _ZN5aiter36bf16gemm_bf16_tn_256x256_bpreshuffleE
        _ZN5aiter37bf16gemm_fp32bf16_tn_32x64_pf3_splitkE.kd
        _ZN5aiter44f4gemm_bf16_per1x32Fp4_noBpreShuffle_256x256E
        _ZN5aiter41mla_dec_stage1_bf16_a16w16_subQ128_mqa128E
        aiter::fmha_bwd_hd64_bf16_causal_a16_rtne_recompile
        aiter::fmha_fwd_hd128_bf16_causal_group
        void aiter::add_rmsnorm_quant_kernel<__hip_bfloat16, 256>(int)
        void ck_tile::kentry<1, ck_tile::GroupedGemmKernel<ck_tile::GemmSpatiallyLocalTilePartitioner>>(int)
        void ck::kernel_gemm_xdl_cshuffle_v3_multi_d_b_preshuffle<true>(int)
        void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync>>(int)
        miopenSp3AsmConv_v30_3_1_gfx9_fp16_f3x2_stride1
        MIOpenBatchNormFwdTrainSpatial
        igemm_fwd_gtcx3_nhwc_fp16_bx0_ex1_bt128x128x32
        void kn_mla_reduce_v1<MlaReduceKernelV1Traits<512, 64, 4>, float, std::bfloat16_t>(MlaReduceKernelV1Params)
        void splitk_reduce_kernel<16, 64, std::bfloat16_t, false, std::bfloat16_t, true>(int)
        _gemm_a8w8_blockscale_kernel_GRID_MN
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
        triton_poi_fused_embedding_dense_backward_8
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
        fmhaSm100fKernel_QkvE4m3OBfloat16H128PagedKvCausalP64VarSeqQ128Kv128Persistent
        void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2, 4>(Params)
        void flashinfer::BatchPrefillWithRaggedKVCacheKernel<KernelTraits<1, 128>>(Params)
        void flashinfer::AppendPagedKVCacheKernel<128u, 8u, __half, int>(Params)
        void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*, unsigned int)
        void flashinfer::sampling::RadixTopKKernel<4u, float>(float*, unsigned int)
        void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, silu>(__nv_bfloat16*, __nv_bfloat16 const*, int)
        void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u>(__half*)
        BatchMLAPagedAttentionKernel
        void vllm::paged_attention_v2_reduce_kernel<__half, 128, 128, 512>(__half*, float const*)
        void vllm::merge_attn_states_kernel<__half, uint4, 128u>(__half*)
        """,
    "vLLM, SGLang, DeepGEMM, TensorRT-LLM": """
        void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*, float, int, int)
        void vllm::rotary_embedding_kernel<c10::Half, true>(long const*, c10::Half*, c10::Half*)
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(int)
        void vllm::act_and_mul_kernel<c10::BFloat16, vllm::silu_kernel<c10::BFloat16>>(c10::BFloat16*)
        void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, int>(float const*, bool const*, float*)
        void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*)
        void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16 const*, int)
        void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16>(c10::Float8_e4m3fn*)
        void marlin::Marlin<__half, 256, 1, 8, 8, 4, false, 8>(int4 const*, int4 const*, int4*)
        fused_moe_kernel
        _moe_sum_reduce_kernel
        _fused_gate_sigmoid_mul_add_kernel
        _w8a8_block_fp8_matmul
        _per_token_group_quant_8bit_colmajor
        _fwd_grouped_kernel_stage1
        _fwd_kernel_stage2
        _gumbel_sample_kernel
        _silu_and_mul_post_quant_kernel
        _combine_sampled_and_draft_tokens_kernel
        void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 256u, 128u, 128u, 0u, 128u, 4u>(__nv_bfloat16*)
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 1u, 128u, 128u>(float*)
        void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*, int*, int*, int*, bool*, int)
        void moe::dev::routing::routingDeepSeek::routingMainKernel<float, __nv_bfloat16>(Params)
        void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__half, __half>(__half const*)
        void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__half, float>(float const*)
        """,
    "Transformer Engine, Apex, Megatron, DeepSpeed, Liger, Primus, Mamba": """
        void transformer_engine::cast_transpose_fused_kernel<false, true, float>(float)
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>(KernelParams)
        void transformer_engine::gated_act_kernel<float, __nv_bfloat16>(float)
        void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(__nv_bfloat16 const*)
        void multi_tensor_apply_kernel<TensorListMetadata<5, false>, transformer_engine::AdamFunctorMaster>(long)
        void multi_tensor_apply_kernel<TensorListMetadata<2>, L2NormFunctor<float>, float*>(long)
        void scaled_upper_triang_masked_softmax_warp_forward<__half, __half, float, 11>(__half*, __half const*)
        void cuApplyLayerNorm<__half, float, __half>(__half*, float*, float*, __half const*)
        void apply_rotary_pos_emb<__half, 8, 32>(__half*, __half*, int)
        void fused_bias_gelu<__half>(__half*, __half const*, int)
        _layer_norm_fwd_1pass_kernel
        _rmsnorm_bwd_kernel
        liger_cross_entropy_kernel
        _swiglu_forward_kernel
        _permute_kernel
        _unpermute_kernel
        _row_id_map_pass_1_kernel
        _chunk_scan_fwd_kernel
        _chunk_state_bwd_dx_kernel
        _state_passing_fwd_kernel
        void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true, c10::BFloat16>>(ConvParamsBase)
        void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1>>(SSMParamsBase)
        fused_recurrent_gated_delta_rule_fwd_kernel
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64
        fused_qkvzba_split_reshape_cat_kernel
        split_embedding_codegen_forward_unweighted_kernel
        void bounds_check_indices_kernel<long, false>(at::GenericPackedTensorAccessor<int>)
        kQuantizeBlockwise<__nv_bfloat16, 64, 2, 0, 2>(float*, __nv_bfloat16*, float*)
        """,
}


def names(table: dict[str, str]) -> list[str]:
    return [line.strip() for text in table.values() for line in text.strip().splitlines()]


def test_no_kernel_that_communicates_is_computation_without_a_doubt() -> None:
    kernels = names(COMMUNICATE)
    assert len(set(kernels)) == len(kernels) >= 200
    assert [name for name in kernels if not communicates(name) and not doubtful(name)] == []
    # All but those of projects that the table does not have are communication.
    unknown = COMMUNICATE["Triton-distributed, Kraken, Iris, ThunderKittens: not in the table, so a doubt"]
    assert {name for name in kernels if not communicates(name)} == {
        line.strip() for line in unknown.strip().splitlines()
    }


def test_no_kernel_that_computes_is_communication() -> None:
    kernels = names(COMPUTE)
    assert len(set(kernels)) == len(kernels) >= 200
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
