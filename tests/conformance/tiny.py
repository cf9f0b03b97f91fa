# SPDX-License-Identifier: Apache-2.0
"""The example of docs/extending.md, and a suite for backends that are derived from it."""

from __future__ import annotations

from ..docs.pages import ROOT, block

EXTENDING = ROOT / "docs" / "extending.md"

#: The module, the hook and the class of tests of that page.
BACKEND, HOOK, SUITE = (
    block(EXTENDING, name).code for name in ("tiny_backend.py", "conftest.py", "test_tiny.py")
)

#: A derived backend: ``code`` has the class ``Derived``. Data parallelism, which needs two ranks, is off by
#: default.
DERIVED = """
import os, random, signal, subprocess, sys, threading, time
from dataclasses import replace
import msgspec
import tiny_backend
from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.errors import BackendError, ModelError
from tiny_backend import TinyBackend, TinyJob

{code}

ROW = replace(tiny_backend.SPEC.capabilities, **{{'data': False, **dict({row})}})
NAMES = {{"name": "{module}", "factory": "{module}:Derived", "capabilities": ROW}}
SPEC = replace(tiny_backend.SPEC, **NAMES, **dict({spec}))
"""
SUITE_OF_DERIVED = """
import {module}
from pytest_llenergy.conformance import BackendConformance

class Test_{module}(BackendConformance):
    spec = {module}.SPEC
    model = "random:llama-tiny"
    reference = None
    why_no_reference = "nobody else has these weights"
    why_no_sampling = "it is greedy"
{attributes}
"""

#: A backend with a separate class of jobs.
JOBS = """
class Derived(TinyBackend):
    def prepare(self, prompts, params):
        return Job(self.weights, [list(prompt.encode()) for prompt in prompts], params)
"""
