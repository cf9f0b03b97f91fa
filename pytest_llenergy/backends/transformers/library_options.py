# SPDX-License-Identifier: Apache-2.0
"""Options of transformers itself that tests may give: which exist, where they go, and which are not theirs.

``from_pretrained`` takes any keyword: it sets attributes of the configuration that have the name, and ignores
the rest or fails late. Names are therefore checked against the library's own lists first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.backends.engine_options import (
    ARGUMENT,
    DEVICES,
    SOURCE,
    check_engine_options,
    list_keywords,
)
from pytest_llenergy.backends.transformers import SPEC

#: A documented parameter: ``name (`type`, *optional*):`` at the indentation of its docstring.
DOCUMENTED = re.compile(r"^ {12}(\w+) ?\(.*\):$", re.MULTILINE)

DRAFTING = "it is part of the load option speculative"
METADATA = "it describes the model, and changes nothing"
COUNTED = "outputs are counted as one sequence of tokens per prompt"

#: Options of transformers that this backend sets, with the reason.
RESERVED: Mapping[str, str] = {
    "attn_implementation": "use the load option attention",
    "torch_dtype": "use the load option dtype",
    **dict.fromkeys(("device_map", "max_memory", "device_mesh", "tp_plan", "tp_size"), DEVICES),
    **dict.fromkeys(("distributed_config", "offload_folder", "offload_buffers"), DEVICES),
    **dict.fromkeys(("pretrained_model_name_or_path", "model_args", "config", "state_dict"), SOURCE),
    **dict.fromkeys(("revision", "subfolder", "output_loading_info"), SOURCE),
    **dict.fromkeys(("architectures", "model_type", "name_or_path", "transformers_version"), METADATA),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type"), METADATA),
    **dict.fromkeys(("finetuning_task", "task_specific_params"), METADATA),
    **dict.fromkeys(("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p"), ARGUMENT),
    **dict.fromkeys(("num_beams", "repetition_penalty", "max_length"), ARGUMENT),
    "eos_token_id": "use ignore_eos and stop_token_ids of generate",
    "cache_implementation": "use cache of generate",
    **dict.fromkeys(("compile_config", "disable_compile"), "use the load option compile"),
    "prefill_chunk_size": "use the load option chunked_prefill",
    "continuous_batching_config": "use batching, num_blocks and max_batch_tokens",
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"), DRAFTING
    ),
    **dict.fromkeys(("num_assistant_tokens_schedule", "assistant_early_exit", "use_mtp"), DRAFTING),
    **dict.fromkeys(("speculation_type", "is_assistant"), DRAFTING),
    **dict.fromkeys(
        ("num_return_sequences", "return_dict", "return_dict_in_generate", "stop_strings"), COUNTED
    ),
    **dict.fromkeys(("pad_token_id", "use_cache", "max_time", "low_memory"), COUNTED),
}


@dataclass(frozen=True)
class LibraryOptions:
    """Options of transformers by where they go.

    Attributes:
        loading: Keywords of ``from_pretrained``, among them attributes of the model's configuration.
        generation: Attributes of ``GenerationConfig``.
    """

    loading: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


def show_options(options: Mapping[str, Any]) -> str:
    """Return options as a test writes them."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def sort_library_options(options: Mapping[str, Any], config: Any) -> LibraryOptions:
    """Check options against the installed version of transformers.

    Args:
        options: Options that are not those of this backend.
        config: Configuration of the model.

    Raises:
        BackendError: If transformers has no such option, or this backend sets it.
    """
    if not options:
        return LibraryOptions()
    from transformers import GenerationConfig, PreTrainedModel, __version__

    loader = PreTrainedModel.from_pretrained
    loading = {*list_keywords(loader), *DOCUMENTED.findall(loader.__doc__ or "")} - {"kwargs"}
    generation = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    attributes = {name for name in config.to_dict() if not name.startswith("_")}
    check_engine_options(
        "transformers",
        options,
        loading | generation | attributes,
        declared=SPEC.capabilities.options,
        where=f"transformers {__version__} (from_pretrained, GenerationConfig, {type(config).__name__})",
        reserved=RESERVED,
    )
    return LibraryOptions(
        loading={name: value for name, value in options.items() if name not in generation},
        generation={name: value for name, value in options.items() if name in generation},
    )
