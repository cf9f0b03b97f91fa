# SPDX-License-Identifier: Apache-2.0
"""SGLang: continuous batching in processes of its own. Written from its documentation; see ``spec``."""
