# SPDX-License-Identifier: Apache-2.0
"""Energy of inference: backends side by side."""
