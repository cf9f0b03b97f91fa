# SPDX-License-Identifier: Apache-2.0
"""A decoding step of a language model's shape, repeated at a constant context length.

A step of ``generate`` grows with every token because there is more context to attend to. These steps are all
equal, so joules per token must not depend on how many are in a window. On CUDA a step is one graph, which
keeps the host's speed out of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

#: Hidden size, layers, heads, feed-forward size, tokens of context, sequences.
CUDA_SHAPE = (2048, 16, 16, 8192, 512, 8)
CPU_SHAPE = (128, 2, 2, 256, 64, 2)


class Decoder:
    """A decoder with about a billion random bf16 weights on CUDA, few on the CPU."""

    def __init__(self, device: str, *, as_graph: bool = True) -> None:
        import torch

        self._torch = torch
        cuda = device.startswith("cuda")
        if not cuda:
            # Products this small do not gain from a second thread.
            torch.set_num_threads(1)
        hidden, layers, self._heads, inner, context, batch = CUDA_SHAPE if cuda else CPU_SHAPE
        self.tokens_per_step = batch
        self._head_size = hidden // self._heads
        torch.manual_seed(0)
        like = {"device": device, "dtype": torch.bfloat16}

        def random_tensor(*shape: int) -> Any:
            return torch.randn(*shape, **like) * shape[-1] ** -0.5

        self._layers = [
            (
                random_tensor(3 * hidden, hidden),
                random_tensor(hidden, hidden),
                random_tensor(2 * inner, hidden),
                random_tensor(hidden, inner),
            )
            for _ in range(layers)
        ]
        self._caches = [
            (
                random_tensor(batch, self._heads, context, self._head_size),
                random_tensor(batch, self._heads, context, self._head_size),
            )
            for _ in range(layers)
        ]
        self._input = random_tensor(batch, hidden)
        self._graph: Any = None
        how = "as they come"
        with torch.inference_mode():
            if cuda and as_graph:
                how = self._capture()
            self.run(2)
        parameters = sum(weight.numel() for layer in self._layers for weight in layer)
        self.what = (
            f"decoding steps of {parameters / 1e9:.2g} billion bfloat16 parameters, {batch} sequences, "
            f"{context} tokens of context, {how}"
        )

    def run(self, steps: int) -> None:
        """Run ``steps`` steps and wait for the last one."""
        with self._torch.inference_mode():
            for _ in range(steps):
                if self._graph is None:
                    self._step()
                else:
                    self._graph.replay()
        if self._input.is_cuda:
            self._torch.cuda.synchronize()

    def _capture(self) -> str:
        """Capture a step as a CUDA graph; without one its kernels are launched one by one."""
        torch = self._torch
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            return f"without a CUDA graph ({str(error).splitlines()[0]})"
        self._graph = graph
        return "as one CUDA graph"

    def _step(self) -> Any:
        functional = self._torch.nn.functional
        state = self._input
        for (attend, project, spread, gather), (keys, values) in zip(self._layers, self._caches, strict=True):
            query = (functional.rms_norm(state, state.shape[-1:]) @ attend.T)[:, : state.shape[-1]]
            query = query.view(state.shape[0], self._heads, 1, self._head_size)
            seen = functional.scaled_dot_product_attention(query, keys, values)
            state = state + seen.reshape(state.shape) @ project.T
            gate, up = (functional.rms_norm(state, state.shape[-1:]) @ spread.T).chunk(2, dim=-1)
            state = state + (functional.silu(gate) * up) @ gather.T
        return state


def _set_at_end_of_input(over: threading.Event) -> None:
    """Set ``over`` when standard input ends, which is how the parent process stops this one."""
    sys.stdin.read()
    over.set()


def main(argv: Sequence[str]) -> None:
    """Decode until standard input ends; print the start and end (ns) and the steps of each chunk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("--chunk", type=float, default=0.05, metavar="S", help="length of a chunk (0.05)")
    args = parser.parse_args(argv)
    decoder = Decoder(args.device)
    begin_s = time.monotonic()
    decoder.run(10)
    steps = max(1, round(10 * args.chunk / (time.monotonic() - begin_s)))
    print(json.dumps({"what": decoder.what, "steps": steps}), flush=True)
    over = threading.Event()
    threading.Thread(target=_set_at_end_of_input, args=(over,), daemon=True).start()
    chunks = []
    while not over.is_set():
        start_ns = time.monotonic_ns()
        decoder.run(steps)
        chunks.append((start_ns, time.monotonic_ns()))
    print(json.dumps(chunks), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
