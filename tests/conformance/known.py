"""Tests that torch's class passes here and ours does not, on purpose: name -> reason.

The run fails when a test of this list starts to pass, so the list can't go stale.
"""

from __future__ import annotations

_NO_ERROR = "unused parameters need no flag here: the step is right, so there is no error to expect"

KNOWN: dict[str, str] = {
    "test_ddp_unused_params_rebuild_buckets_exception": _NO_ERROR,
    "test_ddp_control_flow_same_across_ranks": _NO_ERROR,
    "test_ddp_control_flow_different_across_ranks": _NO_ERROR,
    "test_ddp_multiple_nested_unused_params_error": _NO_ERROR,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _NO_ERROR,
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": (
        "hands ddp.logger to a C++ function that takes only torch's own Logger, which comes only with its Reducer"
    ),
}
