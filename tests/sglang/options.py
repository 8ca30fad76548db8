"""The handling of each field of SGLang's ServerArgs: handled (by which test), refused, or without effect on pages.

`test_options.py` fails if the installed SGLang has a field that is in no table: a person has to decide before kvflow is
used with that version. The fields are those of SGLang 0.5.23. Options that kvflow refuses are in
`kvflow.sglang.server_settings.REFUSED_OPTIONS`.
"""

from __future__ import annotations

HANDLED = {
    "tp_size": "test_classes.py::test_tensor_parallelism",
    "page_size": "test_classes.py::test_what_sglang_compares_is_refused_before_a_byte_moves",
    "kv_cache_dtype": "test_classes.py::test_what_sglang_compares_is_refused_before_a_byte_moves",
    "dtype": "test_classes.py::test_what_sglang_compares_is_refused_before_a_byte_moves",
    "c128_page_size": "test_classes.py::test_state_of_another_shape_is_refused",
    "dsv4_attn_backend": "test_classes.py::test_state_of_another_shape_is_refused",
    "enable_deepseek_v4_fp4_indexer": "test_classes.py::test_state_of_another_shape_is_refused",
    "qsa_indexer_dtype": "test_classes.py::test_state_of_another_shape_is_refused",
    "disable_hybrid_swa_memory": "test_classes.py::test_servers_with_other_components_of_state_are_refused",
    "mamba_ssm_dtype": "test_classes.py::test_state_of_another_dtype_is_refused",
    "speculative_algorithm": "test_classes.py::test_a_draft_model_may_be_on_one_server",
    "enable_multi_layer_eagle": "test_classes.py::test_a_draft_model_may_be_on_one_server",
    "chunked_prefill_size": "test_classes.py::test_pages_and_the_first_token_arrive_chunk_by_chunk",
    "disaggregation_decode_enable_radix_cache": "test_pair.py::test_prefixes_that_either_side_has",
    "disable_radix_cache": "test_pair.py::test_prefixes_that_either_side_has",
    "disaggregation_decode_retraction_backup": "test_pair.py::test_requests_that_are_retracted",
    "disaggregation_transfer_backend": "test_classes.py::test_a_prefill_server_of_another_backend_is_refused",
    "disaggregation_mode": "test_pair.py::test_tokens_are_those_of_one_server",
    "enable_return_hidden_states": "test_classes.py::test_hidden_states_go_as_pages_do",
}
"""By field: the test, in this folder, that shows it."""

INDIFFERENT = {
    "read only with options that are refused": """
        dcp_comm_backend dcp_replicate_q_proj enable_prefill_cp cp_strategy enable_cp_tp_group_sharing
        enable_dsa_cache_layer_split enable_cp_decode_attn_tp pp_max_micro_batch_size pp_async_batch_depth
        enable_page_major_kv_layout hisparse_config enable_weights_cpu_backup enable_draft_weights_cpu_backup""",
    "refused by SGLang itself, at the start or when it is used, on servers that hand over with a backend of others": """
        enable_linear_replayssm linear_replayssm_cache_len enable_watermark watermark_config watermark_key
        watermark_key_b watermark_context_window watermark_mixing_probability watermark_max_probability
        watermark_default_enabled watermark_enforce_all enable_response_store dllm_algorithm
        dllm_algorithm_config dllm_fdfo prefill_only_disable_kv_cache enable_pd_role_switch
        disaggregation_decode_host_receive_threshold""",
    "each data-parallel rank has pools, a scheduler and an engine id of its own": """
        dp_size attn_dp_size enable_dp_attention enable_dp_attention_local_control_broadcast
        load_balance_method""",
    "how ranks are started, and how they divide what is not in the cache": """
        nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank moe_dp_size dwdp_size
        enable_dp_lm_head enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered
        enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp
        enable_megamoe_for_layernorm_sp disable_attn_tp_gather enable_p2p_check ep_size moe_dense_tp_size
        ep_join_rank_offset elastic_ep_initial_size max_ep_size""",
    "devices and processes; where pools are, they say": """
        device base_gpu_id gpu_id_step random_seed mlx_enable_sampling watchdog_timeout soft_watchdog_timeout
        sleep_on_idle use_ray custom_sigquit_handler numa_node gc_threshold""",
    "how kernels, experts and layers compute: pages hold the same": """
        attention_backend decode_attention_backend enable_lean_attention enable_nvidia_megakernel
        enable_amd_monokernel prefill_attention_backend prefill_kv_cache_dequant_dtype sampling_backend
        grammar_backend fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend dsa_prefill_backend
        dsv4_prefill_backend dsa_triton_union dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope enable_precise_embedding_interpolation enable_dsa_fused_indexer
        cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs enable_layerwise_nvtx_marker
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
        enable_scattered_sconv pre_warm_nccl boundary_reduction enable_quant_communications
        enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
        enable_fused_moe_sum_all_reduce moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode
        moe_runner_backend flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode
        deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        expert_balancedness_report_mode deepep_config elastic_ep_backend enable_elastic_expert_backup
        mooncake_ib_device enable_waterfill ep_join_mode elastic_ep_scale_timeout
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion enable_paged_experts paged_experts_num_resident kt_weight_path kt_method
        kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token
        enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold cpu_offload_gb
        offload_group_size offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding
        ple_offload_backend ple_offload_dir enable_deterministic_inference rl_on_policy_target""",
    "what a prefix cache and its lower tiers keep: pages are loaded back before a step that uses them": """
        radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config
        enable_session_radix_cache radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode
        hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
        unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup
        enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file""",
    "how states are kept between requests, and computed: those of running requests are whole": """
        mamba_backend mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
        enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend
        linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm_spec""",
    "what is computed beside the cache, and goes with SGLang's metadata if at all": """
        enable_fp32_lm_head enable_tf32_matmul enable_custom_logit_processor return_hidden_states_mode
        enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
        enable_return_routed_experts enable_return_indexer_topk enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay sampling_mask_max_tokens disable_outlines_disk_cache enable_mis""",
    "adapters: not compared, as SGLang's page says": """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras
        lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold""",
    "pictures and sounds before they are tokens": """
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache
        mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes
        limit_mm_data_per_request enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport""",
    "which model, and how its weights are found and read: both servers need the same model": """
        model_path load_format model_loader_extra_config trust_remote_code context_length is_embedding
        revision model_impl model_config_parser json_model_override_args quantization quantization_param_path
        modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
        quantize_and_serve rl_quant_profile startup_weight_load_mode custom_weight_loader
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config download_dir model_checksum delete_ckpt_after_loading decrypted_config_file
        decrypted_draft_config_file checkpoint_engine_wait_weights_before_ready weight_cache_mode
        weight_cache_socket weight_cache_timeout""",
    "logs, metrics and dumps": """
        log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
        smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging kv_events_config
        load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
        export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
        kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers
        debug_tensor_dump_input_file forward_hooks msprobe_dump_config""",
    "when requests are scheduled, and how large pools are": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens prefill_decode_interval
        prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests
        schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
        disable_chunked_prefix_cache disable_overlap_schedule num_continuous_decode_steps
        scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio
        enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
        prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay""",
    "HTTP, tokenizer and answers": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
        skip_tokenizer_init host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode
        grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args skip_server_warmup
        warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        served_model_name weight_version chat_template trust_request_chat_template hf_chat_template_name
        completion_template file_storage_path enable_cache_report return_input_ids return_output_ids
        reasoning_parser default_chat_template_kwargs strip_thinking_cache enable_strict_thinking
        tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions
        preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size
        stream_response_default_include_usage incremental_streaming_output enable_streaming_session
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode""",
    "how drafts are made: the model checks them": """
        uno_lora_path speculative_draft_model_path speculative_boundary_reduction
        speculative_draft_model_revision speculative_draft_load_format speculative_num_steps
        speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size
        speculative_domino_candidate_pool_size speculative_dspark_block_size speculative_dspark_sps_table_path
        speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_accept_threshold_single speculative_accept_threshold_acc
        speculative_use_rejection_sampling speculative_use_block_verification speculative_token_map
        speculative_attention_mode speculative_draft_attention_backend speculative_dsa_topk_backend
        speculative_draft_kv_cache_dtype speculative_draft_window_size speculative_draft_sink_size
        speculative_moe_runner_backend speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe
        speculative_draft_model_quantization _speculative_draft_quantization_explicitly_set
        speculative_adaptive speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
        speculative_ngram_capacity speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens""",
    "how servers find each other, and what SGLang computes of the same pages": """
        disaggregation_bootstrap_port disaggregation_ib_device disaggregation_enable_kv_checksum""",
    "when servers take requests, and copies of pages that SGLang keeps": """
        disaggregation_decode_enable_offload_kvcache num_reserved_decode_tokens
        disaggregation_decode_extra_slots disaggregation_decode_polling_interval optimistic_prefill_attempts""",
    "servers of other kinds: drafters, encoders, prefill and decode on one GPU": """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
        encoder_only language_only language_model_only encoder_transfer_backend encoder_urls
        encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder enable_pdmux
        pdmux_config_path sm_group_num""",
}
"""By reason, fields that change neither the meaning of a page index nor the content of a page."""
