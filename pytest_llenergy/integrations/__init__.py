# SPDX-License-Identifier: Apache-2.0
"""What it takes to run beside other plugins.

Only the plugin and its controller import these modules, which import none of them.
"""
