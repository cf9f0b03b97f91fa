# SPDX-License-Identifier: Apache-2.0
"""Reports with everything that a page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from random import Random
from typing import Any

import msgspec

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.record.comparison import ComparedReports, Comparison
from pytest_llenergy.record.load_curve import LoadCurve, LoadPoint, slo
from pytest_llenergy.record.record import BackendInfo, Flag, Record, Tokens, WindowRecord
from pytest_llenergy.record.report import Report

from ..compare.runs import SPOILED, TEST, record_of, report_of, round_of

#: What a test of each verdict is changed by.
CHANGES = {"regressed": 1.08, "improved": 0.9, "unchanged": 1.001, "inconclusive": 1.035}

#: What somebody may write into a report.
HOSTILE = (
    "</script><script>hacked=1</script>",
    "</title></style></svg></table><img src=x onerror=hacked=1>",
    "\"><svg onload=hacked=1>' onmouseover='hacked=1",
    "<a href=javascript:hacked=1>x</a>",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; url(http://evil.example)",
)


class Reader(HTMLParser):
    """What a browser would see of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, content or "") for name, content in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        self._in_cell = tag == "td" or (tag == "a" and self._in_cell)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._in_cell:
            self.rows[-1][-1] += data.strip()

    def row(self, *cells: str) -> list[str]:
        """The first row with these cells."""
        return next(row for row in self.rows if set(cells) <= set(row))

    def of(self, tag: str, name: str) -> list[str]:
        """An attribute of all elements with a tag that have it."""
        return [content for each, key, content in self.attributes if (each, key) == (tag, name)]


@dataclass(frozen=True)
class Pair:
    """Both sides, and what was found."""

    base: Report
    head: Report
    compared: ComparedReports


def names(count: int) -> list[str]:
    """Ids as people have them."""
    models = ("smollm2-135m", "qwen3-0.6b", "llama3.2-1b")
    return [
        f"benchmarks/inference/test_decode.py::test_decode[{models[i % 3]}-bs{2 ** (i // 3)}-bfloat16]"
        for i in range(count)
    ]


def record_like(name: str, rng: Random, joules: float, seconds: float, noise: float) -> Record:
    """A measured test with eight rounds, of which one is invalid."""
    rounds = [
        round_of(
            joules * rng.gauss(1, noise),
            joules * 0.003,
            start_s=100 + 7.5 * number,
            duration_s=seconds * rng.gauss(1, noise / 2),
            tokens=Tokens(input=120, output=2048),
            flags=[SPOILED] if number == 5 else [],
        )
        for number in range(8)
    ]
    warm = Flag(name="temperature", severity="note", detail="4 of 8 rounds: warmer than 60 °C at the start")
    return record_of(name, rounds=rounds, flags=[warm])


def pair_of(ids: Sequence[str]) -> Pair:
    """Two runs of some tests, which change in turn; one more is new, one was removed, and one is invalid."""
    rng = Random(7)
    base, head = [], []
    for place, name in enumerate(ids):
        joules, change = 1700.0 + 80 * (place % 5), list(CHANGES.values())[place % len(CHANGES)]
        noise = 0.03 if change == CHANGES["inconclusive"] else 0.008
        base.append(record_like(name, rng, joules, 2.0, noise))
        head.append(record_like(name, rng, joules * change, 2.0 * change**0.5, noise))
    gone = record_like("benchmarks/test_old.py::test_gone", rng, 1700.0, 2.0, 0.01)
    # Another workload: otherwise it would be the removed test under another name.
    added = record_like("benchmarks/test_new.py::test_added", rng, 1700.0, 2.0, 0.01)
    added = msgspec.structs.replace(added, params={"batch_size": 16})
    lost = record_of("benchmarks/test_prefill.py::test_lost", [None] * 6)
    lost = msgspec.structs.replace(lost, status="invalid", reason="the counter stood still")
    sides = report_of(*base, gone, lost), report_of(*head, added, lost)
    compared = compare_reports(*sides, ("base.json", "head.json"), [Criterion(gated=True)])
    return Pair(*sides, compared)


def decode_record(backend: str, batch_size: int, rng: Random) -> Record:
    """A decode test of a backend; larger batches are slower, and need less energy for a token."""
    speed = {"transformers": 40.0, "llamacpp": 110.0, "openvino": 90.0}[backend]
    joules = {"transformers": 0.9, "llamacpp": 0.42, "openvino": 0.35}[backend] * batch_size**-0.55
    tokens = 256 * batch_size
    rounds = [
        round_of(
            joules * tokens * rng.gauss(1, 0.02),
            joules * tokens * 0.01,
            start_s=100 + 30.0 * number,
            duration_s=tokens / speed / batch_size**0.7 * rng.gauss(1, 0.01),
            iterations=1,
            tokens=Tokens(input=30, output=tokens),
            requests=batch_size,
        )
        for number in range(6)
    ]
    return record_of(
        f"benchmarks/test_decode.py::test_decode[{backend}-{batch_size}]",
        rounds=rounds,
        params={"backend": backend, "batch_size": batch_size},
        backend=BackendInfo(name=backend, version="1.0", model="HuggingFaceTB/SmolLM2-135M-Instruct"),
    )


def load_curve() -> LoadCurve:
    """A search that found a maximum, with a limit that latencies cross steeply and one that they do not."""
    points = [
        LoadPoint(
            request_rate=rate,
            requests=100,
            rounds=rounds,
            requests_per_s=min(rate, 10.2),
            energy_per_output_token_j=0.2 + 1 / rate,
            energy_per_output_token_u_j=0.02 if rounds > 1 else None,
            time_to_first_token_p99_s=ttft_s,
            time_per_output_token_p99_s=0.02 + rate / 1000,
            end_to_end_latency_p99_s=2.0 + ttft_s,
            slo_attainment=share,
            goodput_requests_per_s=min(rate, 10.2) * share,
            saturated=rate > 20,
            within_slo=share >= 0.99,
        )
        for rate, rounds, ttft_s, share in (
            (4.0, 1, 0.05, 1.0),
            (22.6, 1, 9.0, 0.1),
            (9.5, 1, 0.31, 1.0),
            (14.7, 1, 3.0, 0.4),
            (11.8, 2, 0.9, 0.8),
            (10.1, 3, 0.51, 0.98),
            (9.8, 3, 0.46, 0.99),
            (9.8, 6, 0.47, 0.99),
        )
    ]
    return LoadCurve(
        points=points,
        slo=slo(ttft=0.5, tpot=0.05),
        between=(0.5, 32.0),
        max_load_requests_per_s=9.8,
        exceeded_at_requests_per_s=10.1,
    )


def run_of() -> Report:
    """A run of parametrised tests, and of tests with windows only, without tokens and without a result."""
    rng = Random(3)
    backends = ("transformers", "llamacpp", "openvino")
    decoded = [decode_record(backend, size, rng) for backend in backends for size in (1, 8, 32)]
    decoded[-1] = msgspec.structs.replace(decoded[-1], load_curve=load_curve())
    plain = [
        record_of(
            f"benchmarks/test_text.py::test_{name}",
            rounds=[round_of(joules, tokens=None, requests=None) for _ in range(6)],
            params={},
            backend=None,
        )
        for name, joules in (("tokenize", 0.02), ("embed", 1.7), ("sort_a_very_long_list", 0.4))
    ]
    windows = [
        WindowRecord(name, 3.0 * place, 1.5, energy_j, 0.1, 0.2, {}, reason="shorter than a tick")
        for place, (name, energy_j) in enumerate((("load", 2.5), ("sampling", None)))
    ]
    reason = "the answer has changed: " + "/a/path/without/spaces/and word " * 30
    return report_of(
        *decoded,
        *plain,
        Record("benchmarks/test_pipeline.py::test_pipeline", 1, "measured", windows=windows),
        Record(id="benchmarks/test_answer.py::test_answer", attempt=1, status="failed", reason=reason),
        Record(id="benchmarks/test_gpu.py::test_gpu[0]", attempt=1, status="skipped", reason="no GPU"),
        Record(id="benchmarks/test_gpu.py::test_gpu[1]", attempt=1, status="skipped", reason="no GPU"),
    )


def odd(**changes: Any) -> Comparison:
    """A comparison that no run has."""
    made = {"id": TEST, "metric": "energy_j", "unit": "J", "verdict": "regressed", "reason": "because"}
    return msgspec.convert({**made, **changes}, Comparison)
