# SPDX-License-Identifier: Apache-2.0
"""Optional neighbours. Nothing but the plugin imports them."""
