# SPDX-License-Identifier: Apache-2.0
"""Every setting of torch is compared after each test, or named here with the reason why not."""

from __future__ import annotations

import re
import subprocess
import sys

#: Functions whose names are those of setters, but whose effect need not or cannot be compared.
NOT_COMPARED = {
    "concerns one tensor or one call": r"_set_(conj|neg|tensor_metadata|creation_meta|tracing_state"
    r"|value_trace|skip_next_torch_function)|set_module",
    "is a kernel's own condition": r"_use_(cudnn_ctc_loss|cudnn_rnn_flatten_weight|miopen_ctc_loss)",
    "is compared under another name": r"set_(default_tensor_type|flush_denormal|detect_anomaly|stance"
    r"|enable_guard_collectives|default_backend|flags)|_set_(default_tensor_type|sdp_use_\w+"
    r"|fp32_precision_setter)|set_autocast_(cpu|gpu|ipu|xla)_dtype",
    "is set before each round": r"set_rng_state",
    "is deprecated": r"_jit_set_(bailout_depth|nvfuser_\w+)",
    "changes messages only, or tests of torch itself": r"_jit_set_(logging_stream|onnx_log_output_stream"
    r"|utf8_decoding_ignore)|_set_(print_stack_traces_on_fatal_signal|empty_test_observer|thread_name"
    r"|warn_deprecated_on_mutable_data_ptr|warn_on_accumulate_grad_stream_mismatch"
    r"|should_use_format_with_string_table)",
    "is used by torch itself, and has no getter": r"_set_(cached_tensors_enabled|default_mobile_cpu_allocator"
    r"|generator_metaclass|meta_in_tls_dispatch_include|only_lift_cpu_tensors|override_stale_capture_stream"
    r"|throw_on_mutable_data_ptr|worker_pids|worker_signal_handlers)|_override_stale_capture_stream",
}

FIND_SETTERS = """
import re, sys, torch, torch.__future__
from pytest_llenergy.ranks import torch_state
compared = " ".join(torch_state.settings())
owners = [torch, torch._C, torch._C._autograd, torch.__future__, torch.autograd, torch.compiler, torch.jit]
owners += [module for name, module in sys.modules.items() if name.startswith("torch.backends")]
for owner in owners:
    for name in dir(owner):
        match = re.fullmatch(r"_?(?:jit_)?(?:set|use|override)_(\\w+)", name)
        if match and callable(getattr(owner, name)):
            if re.sub("^autocast_|_(enabled|mode)$", "", match[1]) not in compared:
                print(name)
"""


def test_each_setter_of_torch_is_compared_or_has_a_reason() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FIND_SETTERS]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(names) > 20
    assert [
        name for name in names if not any(re.fullmatch(each, name) for each in NOT_COMPARED.values())
    ] == []
