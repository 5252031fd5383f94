"""Each behaviour that torch's own tests of compiled data parallelism name has a test here: by their names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# torch's test -> ours, in this folder.
SEEDS = {
    "test_aot_autograd": "test_split.py::test_parts_in_aot_eager",
    "test_call_method_forward": "test_split.py::test_as_many_parts_as_torch_makes",
    "test_compiled_flex_attention_full_model_ddp": "test_split.py::test_flex_attention_in_a_part_by_itself_and_nested",
    "test_compiled_flex_attention_local_ddp": (
        "test_models.py::test_flex_attention_compiled_with_the_model_and_by_itself"
    ),
    "test_custom_layer": "test_split.py::test_as_many_parts_as_torch_makes",
    "test_ddp_activation_checkpointing": "test_in_graph.py::test_activation_checkpointing_in_the_graph",
    "test_ddp_baseline_aot_eager": "test_in_graph.py::test_one_graph_and_the_same_gradients_for_any_bucket_size",
    "test_ddp_baseline_aot_eager_multiprocess": "test_split_plan.py::test_gradients_are_those_of_eager_training",
    "test_ddp_baseline_inductor": "test_in_graph.py::test_one_graph_and_the_same_gradients_for_any_bucket_size",
    "test_ddp_optimizer_inductor_strides_dont_specialize": (
        "test_split_values.py::test_parts_are_compiled_for_the_strides_they_get"
    ),
    "test_empty_graph_inductor": "test_split.py::test_graphs_without_parameters_or_inputs",
    "test_graph_split": "test_split.py::test_as_many_parts_as_torch_makes",
    "test_graph_split_ctx_manager": "test_split.py::test_contexts_are_left_and_entered_again",
    "test_graph_split_inductor": "test_split_plan.py::test_gradients_in_inductor",
    "test_graph_split_inductor_layout_optimizations_inference": (
        "test_split_values.py::test_convolutions_and_transposes_in_inductor"
    ),
    "test_graph_split_inductor_layout_optimizations_training": (
        "test_split_values.py::test_convolutions_and_transposes_in_inductor"
    ),
    "test_graph_split_inductor_transpose": "test_split_values.py::test_convolutions_and_transposes_in_inductor",
    "test_hf_bert_ddp_aot_eager": "test_models.py::test_bert",
    "test_hf_bert_ddp_aot_eager_static_graph": "test_models.py::test_bert",
    "test_hf_bert_ddp_inductor": "test_models.py::test_bert",
    "test_hf_bert_ddp_inductor_static_graph": "test_models.py::test_bert",
    "test_higher_order_op": "test_split.py::test_parts_in_aot_eager",
    "test_ignored_parameters": "test_split.py::test_ignored_parameters_are_in_no_bucket",
    "test_issue90375": "test_split.py::test_graphs_without_parameters_or_inputs",
    "test_no_split": "test_split.py::test_as_many_parts_as_torch_makes",
    "test_symbol_splitting": "test_split_values.py::test_what_crosses_a_cut",
    "test_unbacked_symbol_splitting_direct": "test_split_values.py::test_what_crosses_a_cut",
    "test_unbacked_symbol_splitting_indirect": "test_split_values.py::test_what_crosses_a_cut",
    "test_unbacked_symbol_splitting_no_binding": "test_split_values.py::test_what_crosses_a_cut",
    "test_unbacked_symbol_splitting_torture_multi": "test_split_values.py::test_what_crosses_a_cut",
    # Ranks that compile differently.
    "test_asymmetric_compilation": "test_agreement.py::test_a_rank_that_compiles_longer_than_the_timeout_kills_nobody",
    "test_asymmetric_compilation_with_fx_cache": (
        "test_agreement.py::test_nor_does_it_if_the_others_have_it_in_their_cache"
    ),
    "test_compiler_collectives_automatic_dynamic_tensor": (
        "test_agreement.py::test_ranks_that_see_different_shapes_compile_equally_often"
    ),
    "test_guard_collective": "test_agreement.py::test_if_one_rank_must_recompile_all_do",
}
# Not in this table: fully sharded modules (`test_fsdp_*`, `test_hf_bert_fsdp*`), what is tests/tracing's subject
# (`test_get_pg_attr`, `test_async_subclass_no_specialize`), the other `test_compiler_collectives_*`
# (test_agreement.py), and what needs a GPU (`test_ddp_optimizer_cudagraph`, `test_multiproc_autotune*`).


@pytest.mark.parametrize("seed", SEEDS)
def test_each_has_one_here(seed: str) -> None:
    file, _, name = SEEDS[seed].partition("::")
    tree = ast.parse((HERE / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
