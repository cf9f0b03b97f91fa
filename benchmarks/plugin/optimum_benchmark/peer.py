# SPDX-License-Identifier: Apache-2.0
"""Run optimum-benchmark in its own environment: ``peer.py MODEL OUT LAUNCHER ITERATIONS WARMUPS``.

Writes the peer's ``report.json`` and ``versions.json`` into OUT.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
from pathlib import Path

from setting import BATCH_SIZE, DTYPE, NEW_TOKENS, PROMPT_TOKENS, SEED


def main(model: str, out: Path, launcher: str, iterations: int, warmups: int) -> None:
    """Run one benchmark and save its report."""
    import torch
    from optimum_benchmark import (
        Benchmark,
        BenchmarkConfig,
        InferenceConfig,
        InlineConfig,
        ProcessConfig,
        PyTorchConfig,
    )

    logging.basicConfig(level="INFO")
    config = BenchmarkConfig(
        name="same_work",
        launcher={"process": ProcessConfig, "inline": InlineConfig}[launcher](),
        backend=PyTorchConfig(
            model=model,
            task="text-generation",
            library="transformers",
            device="cpu",
            torch_dtype=DTYPE,
            seed=SEED,
        ),
        scenario=InferenceConfig(
            # Otherwise it runs for at least ten seconds, whatever the number of iterations.
            duration=0,
            iterations=iterations,
            warmup_runs=warmups,
            input_shapes={"batch_size": BATCH_SIZE, "sequence_length": PROMPT_TOKENS},
            generate_kwargs={"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS},
            latency=True,
            energy=True,
        ),
    )
    report = Benchmark.launch(config)
    report.save_json(out / "report.json")
    packages = ("optimum-benchmark", "transformers", "torch", "codecarbon")
    versions: dict[str, str | int] = {name: importlib.metadata.version(name) for name in packages}
    versions["threads"] = torch.get_num_threads()
    (out / "versions.json").write_text(json.dumps(versions))


# The guard is required: the process launcher spawns, which imports this file again.
if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
