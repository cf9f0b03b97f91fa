# SPDX-License-Identifier: Apache-2.0
"""Studies of LLenergyMeasure (YAML), converted into test files."""
