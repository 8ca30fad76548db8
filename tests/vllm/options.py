"""The handling of each option of vLLM: handled (and by which test), refused, or without effect on blocks.

`test_options.py` fails if the installed vLLM has a field that is in no table: a person has to decide before kvflow is
used with that version. The fields are those of vLLM 0.32 and 0.33. Options that kvflow itself refuses are in
`kvflow.vllm.extra_config.REFUSED_OPTIONS`.
"""

from __future__ import annotations

HANDLED = {
    "parallel_config": {
        "pipeline_parallel_size": "test_settings.py::test_ranks_and_names_are_vllms",
        "tensor_parallel_size": "test_models.py::test_the_tokens_are_those_of_a_single_instance",
        "data_parallel_size": "test_models.py::test_the_tokens_are_those_of_a_single_instance",
        "decode_context_parallel_size": "test_context_parallel.py::test_a_prompt_is_where_vllm_looks_for_it",
        "cp_kv_cache_interleave_size": (
            "test_context_parallel.py::test_tokens_that_are_not_dealt_out_by_blocks_are_refused_with_both_values"
        ),
        "data_parallel_index": "test_settings.py::test_ranks_and_names_are_vllms",
        "distributed_executor_backend": "test_options.py::test_a_scheduler_that_knows_only_some_ranks_is_refused",
    },
    "cache_config": {
        "block_size": "test_settings.py::test_groups_and_their_windows",
        "kv_cache_layout": "test_options.py::test_the_layout_of_the_cache_is_the_one_that_ranks_can_divide",
        "cache_dtype": "test_settings.py::test_every_cache_dtype_of_vllms_is_in_the_table",
        "enable_prefix_caching": "test_hand_over.py::test_a_cached_prefix_is_not_received_again",
        "kv_cache_dtype_skip_layers": "test_settings.py::test_layers_that_are_not_quantized_have_the_models_values",
        "mamba_page_size_padded": "test_state.py::test_tensors_of_a_slot_are_where_vllm_has_them",
        "mamba_block_size": "test_settings.py::test_groups_and_their_windows",
        "mamba_cache_dtype": "test_state.py::test_tensors_of_a_slot_are_where_vllm_has_them",
        "mamba_ssm_cache_dtype": "test_state.py::test_tensors_of_a_slot_are_where_vllm_has_them",
    },
    "attention_config": {
        "backend": "test_models.py::test_the_tokens_are_those_of_a_single_instance",
        "backend_per_kind": "test_models.py::test_the_tokens_are_those_of_a_single_instance",
    },
    "scheduler_config": {
        "disable_hybrid_kv_cache_manager": "test_models.py::test_the_tokens_are_those_of_a_single_instance",
        "enable_chunked_prefill": "test_models.py::test_the_tokens_are_those_of_a_single_instance",
        "is_encoder_decoder": "test_settings.py::test_what_is_not_transferred_is_refused_at_the_start",
    },
    "kv_transfer_config": {
        "kv_connector": "test_settings.py::test_the_name_by_which_routers_know_vllms_own_connector",
        "kv_connector_module_path": "test_settings.py::test_the_name_by_which_routers_know_vllms_own_connector",
        "engine_id": "test_settings.py::test_ranks_and_names_are_vllms",
        "kv_buffer_device": "test_settings.py::test_what_would_go_wrong_on_a_gpu_is_refused",
        "kv_role": "test_settings.py::test_ranks_and_names_are_vllms",
        "kv_connector_extra_config": "test_settings.py::test_extra_config_goes_where_it_belongs",
        "kv_load_failure_policy": "test_settings.py::test_prefixes_are_pulled_only_where_a_failed_pull_is_computed",
    },
}
"""By config and field: the test, in this folder, that shows it."""

REFUSED = {
    "attention_config": {
        "hisparse_config": "test_options.py::test_a_cache_in_the_memory_of_the_host_is_refused",
        "indexer_kv_dtype": "test_options.py::test_models_with_an_indexer_are_refused",
        "indexer_sparse_logits": "test_options.py::test_models_with_an_indexer_are_refused",
        "indexer_tp_shard_min_rows": "test_options.py::test_models_with_an_indexer_are_refused",
        "minimax_m3_indexer_cp": "test_options.py::test_models_with_an_indexer_are_refused",
    },
}
"""Refused at the start by what the option makes of the cache: the test, in this folder, that shows it."""

INDIFFERENT = {
    "parallel_config": {
        "who computes experts, and how: their weights are not in the cache": """
            is_moe_model enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config
            expert_placement_strategy all2all_backend enable_elastic_ep elastic_ep_max_dp_size""",
        "numbers, ports and processes of data-parallel engines: each has a scheduler and an engine id of its own": """
            data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_master_ip
            data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb disable_nccl_for_dp_synchronization
            _data_parallel_master_port_list _coord_store_port""",
        "how ranks combine their parts of a result, and from what vLLM sets cp_kv_cache_interleave_size": """
            dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size""",
        "how ranks compute and communicate within a step: blocks hold the same after it": """
            enable_hc_sp enable_batch_sharded_sampling disable_custom_all_reduce enable_shm_tensor_arena enable_dbo
            ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold""",
        "how and where processes of workers are started": """
            max_parallel_loading_workers ray_workers_use_nsight ray_runtime_env placement_group worker_cls
            worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
            assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank
            _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config""",
    },
    "cache_config": {
        "how many blocks there are: block ids are checked against the registered tensors": """
            gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_memory_bytes
            kv_cache_size_tokens kv_cache_max_concurrency""",
        "copies of others, which tell vLLM's parts of them": """
            user_specified_block_size is_attention_free sliding_window skip_page_size_padded
            effective_attention_block_size _block_size_resolved simple_cpu_offload_num_blocks""",
        "what a lookup in vLLM's own prefix cache finds: a connector is asked behind whole blocks only": """
            prefix_match_unit prefix_caching_hash_algo prefix_cache_retention_interval hash_block_size
            cache_hit_alignment_tokens enable_mamba_shared_prefix_checkpoint mamba_cache_mode""",
        "layers that compute less of a prompt have no KV of their own": "kv_sharing_fast_prefill",
        "windows that are loaded are not computed again": "swa_bounded_replay",
        "read only with options that are refused": "replayssm_buffer_len use_kda_recoverssm",
        "vLLM puts its own connector in the place of any other": "kv_offloading_size kv_offloading_backend",
    },
    "attention_config": {
        "how kernels compute: blocks hold the same": """
            minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph
            tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention
            disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization use_non_causal
            sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n
            flex_attn_q_block_size flex_attn_kv_block_size trtllm_ragged_backend""",
    },
    "scheduler_config": {
        "when requests are scheduled, and how many tokens of them: a step says what it computes": """
            max_model_len runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
            long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs
            max_num_queued_tokens is_multimodal_model max_num_encoder_input_tokens encoder_cache_size policy
            disable_chunked_mm_input scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling
            stream_interval""",
        "a scheduler of the user's": "scheduler_cls",
    },
    "kv_transfer_config": {
        "read by other connectors only": "kv_port enable_permute_local_kv",
    },
}
"""By config and reason, fields that change neither the meaning of a block id nor the content of a block."""
