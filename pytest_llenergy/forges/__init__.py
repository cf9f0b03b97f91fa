# SPDX-License-Identifier: Apache-2.0
"""GitHub and GitLab: where a comparison is shown beside the change that it is of."""
