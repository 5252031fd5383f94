"""Each behaviour that torch's own tests of compiled data parallelism name has a test here: by their names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Our tests in this folder, each with those of torch's that it stands for, without their `test_`.
SEEDS = {
    "test_split.py": {
        "test_parts_in_aot_eager": "aot_autograd higher_order_op",
        "test_as_many_parts_as_torch_makes": "call_method_forward custom_layer graph_split no_split",
        "test_flex_attention_in_a_part_by_itself_and_nested": "compiled_flex_attention_full_model_ddp",
        "test_graphs_without_parameters_or_inputs": "empty_graph_inductor issue90375",
        "test_contexts_are_left_and_entered_again": "graph_split_ctx_manager",
        "test_ignored_parameters_are_in_no_bucket": "ignored_parameters",
    },
    "test_models.py": {
        "test_flex_attention_compiled_with_the_model_and_by_itself": "compiled_flex_attention_local_ddp",
        "test_bert": (
            "hf_bert_ddp_aot_eager hf_bert_ddp_aot_eager_static_graph hf_bert_ddp_inductor "
            "hf_bert_ddp_inductor_static_graph"
        ),
    },
    "test_in_graph.py": {
        "test_activation_checkpointing_in_the_graph": "ddp_activation_checkpointing",
        "test_one_graph_and_the_same_gradients_for_any_bucket_size": "ddp_baseline_aot_eager ddp_baseline_inductor",
    },
    "test_split_plan.py": {
        "test_gradients_are_those_of_eager_training": "ddp_baseline_aot_eager_multiprocess",
        "test_gradients_in_inductor": "graph_split_inductor",
    },
    "test_split_values.py": {
        "test_parts_are_compiled_for_the_strides_they_get": "ddp_optimizer_inductor_strides_dont_specialize",
        "test_convolutions_and_transposes_in_inductor": (
            "graph_split_inductor_layout_optimizations_inference "
            "graph_split_inductor_layout_optimizations_training graph_split_inductor_transpose"
        ),
        "test_what_crosses_a_cut": (
            "symbol_splitting unbacked_symbol_splitting_direct unbacked_symbol_splitting_indirect "
            "unbacked_symbol_splitting_no_binding unbacked_symbol_splitting_torture_multi"
        ),
    },
    "test_compile_agreement.py": {
        "test_a_rank_that_compiles_longer_than_the_timeout_kills_nobody": "asymmetric_compilation",
        "test_nor_does_it_if_the_others_have_it_in_their_cache": "asymmetric_compilation_with_fx_cache",
        "test_ranks_that_see_different_shapes_compile_equally_often": "compiler_collectives_automatic_dynamic_tensor",
        "test_if_one_rank_must_recompile_all_do": "guard_collective",
    },
}
# This table leaves out fully sharded modules (`test_fsdp_*`, `test_hf_bert_fsdp*`), what is tests/tracing's subject
# (`test_get_pg_attr`, `test_async_subclass_no_specialize`), the other `test_compiler_collectives_*`
# (test_compile_agreement.py), and what needs a GPU (`test_ddp_optimizer_cudagraph`, `test_multiproc_autotune*`).


@pytest.mark.parametrize("file", SEEDS)
def test_each_has_one_here(file: str) -> None:
    tree = ast.parse((HERE / file).read_text())
    assert SEEDS[file].keys() <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert all(SEEDS[file].values())
