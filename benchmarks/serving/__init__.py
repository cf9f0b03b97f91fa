# SPDX-License-Identifier: Apache-2.0
"""Energy of serving: a server under load."""
