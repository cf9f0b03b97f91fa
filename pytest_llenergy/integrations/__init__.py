# SPDX-License-Identifier: Apache-2.0
"""Support for other plugins. Only the plugin and its controller import these modules."""
